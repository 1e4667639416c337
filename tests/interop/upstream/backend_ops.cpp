// Runs the cases of ggml's own test-backend-ops.cpp, each on a server and on ggml's CPU backend, from a given case on.
//
//     backend_ops ENDPOINT|CPU|DEVICE FIRST [REGEX]
//
// DEVICE is one of a library that GGML_BACKEND_PATH names.
// Every case prints `case INDEX VARS` before it runs, and `OK|FAIL|UNSUPPORTED INDEX OP` after it. The RPC client aborts the
// process if a server refuses a graph; the last line is then `DIED INDEX OP`, and the caller starts the program again at
// INDEX + 1. The test source is included, not linked, because its table of cases is private to it. REGEX selects cases by a match
// in OP(VARS).

#define main ggml_main
#include "test-backend-ops.cpp"
#undef main

#include "ggml-cpu.h"
#include "ggml-rpc.h"

#include <csignal>
#include <unistd.h>

static const test_case * current = nullptr;
static size_t current_index = 0;

static void report_death(int) {
    printf("\nDIED %zu %s\n", current_index, current ? current->current_op_name.c_str() : "-");
    fflush(stdout);
    _exit(1);
}

// The op of a case, from its graph without memory.
static std::string op_of(test_case & test) {
    ggml_init_params params = { ggml_tensor_overhead() * 128 + ggml_graph_overhead(), nullptr, true };
    ggml_context_ptr ctx(ggml_init(params));
    ggml_context_ptr weights(ggml_init(params));
    test.mode = MODE_SUPPORT;
    test.gf = ggml_new_graph(ctx.get());
    return test.op_desc(test.use_weight_context() ? test.build_graph(ctx.get(), weights.get()) : test.build_graph(ctx.get()));
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s ENDPOINT|CPU|DEVICE FIRST [REGEX]\n", argv[0]);
        return 2;
    }
    const std::string endpoint = argv[1];
    const size_t first = strtoull(argv[2], nullptr, 10);
    const bool filtered = argc > 3;
    const std::regex wanted(filtered ? argv[3] : "");
    signal(SIGABRT, report_death);
    signal(SIGSEGV, report_death);
    signal(SIGFPE, report_death);

    ggml_backend_ptr cpu(ggml_backend_cpu_init());
    ggml_backend_cpu_set_use_ref(cpu.get(), true); // as test_backend does: the portable kernels are the reference
    ggml_backend_ptr tested;
    if (endpoint == "CPU") {
        tested.reset(ggml_backend_cpu_init());
    } else if (endpoint.find(':') != std::string::npos) {
        tested.reset(ggml_backend_rpc_init(endpoint.c_str(), 0));
    } else {
        ggml_backend_load_all();
        tested.reset(ggml_backend_init_by_name(endpoint.c_str(), nullptr));
    }
    if (!tested) {
        fprintf(stderr, "there is no %s\n", endpoint.c_str());
        return 2;
    }
    auto tests = make_test_cases_eval();
    auto printer = create_printer(CONSOLE);
    for (size_t i = first; i < tests.size(); i++) {
        if (filtered && !std::regex_search(op_of(*tests[i]) + "(" + tests[i]->vars() + ")", wanted)) {
            continue;
        }
        current = tests[i].get();
        current_index = i;
        printf("case %zu %s\n", i, tests[i]->vars().c_str());
        fflush(stdout);
        const test_status_t status = tests[i]->eval(tested.get(), cpu.get(), nullptr, printer.get());
        const char * word = status == test_status_t::OK ? "OK" : status == test_status_t::FAIL ? "FAIL" : "UNSUPPORTED";
        printf("\n%s %zu %s\n", word, i, current->current_op_name.c_str());
        fflush(stdout);
    }
    printf("END\n");
    return 0;
}
