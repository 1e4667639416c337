// Runs llama.cpp's own test-llama-archs.cpp for one architecture on a server's first device.
//
//     archs --list                     prints the names of all architectures
//     archs ENDPOINT SEED ARCH         compares the logits with those of the CPU, and prints the test's table
//     archs DEVICE SEED ARCH           the same on a device of a library that GGML_BACKEND_PATH names
//
// The test source is included, not linked, because `main` knows no servers. It is called once per architecture, because the RPC
// client aborts the process if a server refuses a graph.

#define main static upstream_main
#include "test-llama-archs.cpp"
#undef main

#include "ggml-rpc.h"

int main(int argc, char ** argv) {
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (const llm_arch & arch : llm_arch_all()) {
            if (arch != LLM_ARCH_UNKNOWN && arch_supported(arch)) {
                printf("%s\n", llm_arch_name(arch));
            }
        }
        return 0;
    }
    if (argc != 4) {
        fprintf(stderr, "usage: %s --list | ENDPOINT|DEVICE SEED ARCH\n", argv[0]);
        return 2;
    }
    const char * device = argv[1];
    if (strchr(device, ':')) {
        ggml_backend_reg_t servers = ggml_backend_rpc_add_server(argv[1]);
        if (servers == nullptr || ggml_backend_reg_dev_count(servers) == 0) {
            fprintf(stderr, "no server at %s\n", argv[1]);
            return 2;
        }
        ggml_backend_register(servers);
        device = ggml_backend_dev_name(ggml_backend_reg_dev_get(servers, 0));
    } else {
        ggml_backend_load_all();
    }
    int status = 1;
    try {
        status = test_backends(std::string("^") + argv[3] + "$", std::stoull(argv[2]), 0.1f, LOG_LEVEL_ERROR, device);
    } catch (const std::exception & e) {
        fprintf(stderr, "%s\n", e.what());
    }
    common_log_flush(common_log_main()); // rows are printed by the thread of the log
    return status;
}
