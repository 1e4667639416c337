# llama.cpp without its AMX kernels: its CPU device keeps the 3-D F16 weights of DeepSeek models in AMX buffers, where it cannot
# multiply by them, and aborts; and GCC 12 removes the stores that set up AMX tiles, so that it ends with SIGILL.
string(APPEND CMAKE_C_FLAGS " -U__AMX_INT8__")
string(APPEND CMAKE_CXX_FLAGS " -U__AMX_INT8__")
