// A library that looks like a ggml of a version that the plug-in has not been tested with.
const char * ggml_version(void) {
    return "99.0.0";
}
