# Unity build of llama.cpp's common library: most of the time of a file goes into headers that all files include (21 files: 7 CPU
# seconds together, about 80 one by one). llama.cpp does the same with its architectures. json.cpp is compiled alone, because it
# defines a name that another file defines too. The calls are deferred to the end of llama.cpp's CMakeLists.txt, when the library
# exists.
cmake_language(DEFER CALL set_target_properties llama-common PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
cmake_language(DEFER CALL set_source_files_properties "${CMAKE_CURRENT_SOURCE_DIR}/common/json.cpp"
    TARGET_DIRECTORY llama-common PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
include("${CMAKE_CURRENT_LIST_DIR}/../interop/compiler.cmake")
