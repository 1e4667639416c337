# GCC 12 removes the stores that set up a configuration of AMX tiles as dead ones, so that llama.cpp ends with SIGILL on processors with
# AMX.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    string(APPEND CMAKE_CXX_FLAGS " -fno-dse")
endif()
