# Included by CMake behind `project()` of llama.cpp: without its library of helpers for command-line programs, which no client
# here uses, and which takes two fifths of the time of the build. llama-cpp-python sets the option in the cache, without a
# choice; a normal variable hides it.
set(LLAMA_BUILD_COMMON OFF)

include("${CMAKE_CURRENT_LIST_DIR}/compiler.cmake")
