# The crate's build script passes only options named LLAMA_* to CMake, but CMake itself reads the variable CMAKE_TOOLCHAIN_FILE of
# the environment (scripts/interop8.sh). CMake includes the file below after llama.cpp's call of `project()`.
set(CMAKE_PROJECT_llama.cpp_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/unity.cmake")
