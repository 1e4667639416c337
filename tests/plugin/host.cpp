// A host of the plug-in: a program with llama.cpp's libraries, as small as it can be. It compiles with the headers of every
// version that the plug-in serves.
//
//     host devices                    prints the registries and their devices
//     host run MODEL [OPTION...]      evaluates a prompt and greedy tokens; prints the tokens, and writes the logits
//
//     --device A,B   devices of the model (default: none, the CPU computes)
//     --rpc SERVERS  servers that are added through the registry named RPC, as llama.cpp's --rpc does
//     --prompt N     tokens of the prompt (default 32), counted from a seed
//     --tokens N     greedy tokens after it (default 16)
//     --logits FILE  raw f32, all tokens
//     --cpu-cache    the KV cache stays on the CPU
//     --flash on|off, --cache TYPE (f16, q8_0)
//     --serve        for each line of stdin: clears the memory, evaluates the prompt and the tokens again
#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

static std::vector<std::string> split(const std::string & list) {
    std::vector<std::string> parts;
    size_t start = 0;
    while (start <= list.size() && !list.empty()) {
        const size_t end = std::min(list.find(',', start), list.size());
        parts.push_back(list.substr(start, end - start));
        start = end + 1;
    }
    return parts;
}

[[noreturn]] static void fail(const std::string & text) {
    fprintf(stderr, "host: %s\n", text.c_str());
    exit(1);
}

static int devices() {
    for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
        ggml_backend_reg_t reg = ggml_backend_reg_get(i);
        printf("registry %s\n", ggml_backend_reg_name(reg));
        for (size_t j = 0; j < ggml_backend_reg_dev_count(reg); j++) {
            ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, j);
            printf("device %s: %s\n", ggml_backend_dev_name(dev), ggml_backend_dev_description(dev));
        }
    }
    return 0;
}

struct options {
    std::string model, logits, cache = "f16", flash;
    std::vector<std::string> devices, servers;
    int prompt = 32, tokens = 16;
    bool cpu_cache = false, serve = false;
};

// Evaluates the prompt and the greedy tokens. Returns llama_decode's code.
static int evaluate(llama_model * model, llama_context * ctx, const options & o) {
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> tokens(o.prompt);
    unsigned state = 1;
    for (auto & token : tokens) {
        state = state * 1664525u + 1013904223u;
        token = (llama_token) ((state >> 8) % (unsigned) vocab);
    }
    FILE * file = o.logits.empty() ? nullptr : fopen(o.logits.c_str(), "wb");
    llama_memory_clear(llama_get_memory(ctx), true);
    int position = 0;
    for (int step = 0; step <= o.tokens; step++) {
        llama_batch batch = llama_batch_init((int) tokens.size(), 0, 1);
        batch.n_tokens = (int) tokens.size();
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = tokens[i];
            batch.pos[i] = position++;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        const int code = llama_decode(ctx, batch);
        const int last = batch.n_tokens - 1;
        llama_batch_free(batch);
        if (code != 0) {
            printf("error %d\n", code);
            fflush(stdout);
            return code;
        }
        for (int i = 0; file && i <= last; i++) {
            fwrite(llama_get_logits_ith(ctx, i), sizeof(float), vocab, file);
        }
        const float * row = llama_get_logits_ith(ctx, last);
        int best = 0;
        for (int i = 1; i < vocab; i++) {
            best = row[i] > row[best] ? i : best;
        }
        tokens.assign(1, best);
        printf("%d ", best);
        fflush(stdout);
    }
    printf("\n");
    fflush(stdout);
    if (file) {
        fclose(file);
    }
    return 0;
}

static int run(const options & o) {
    if (!o.servers.empty()) {
        ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
        if (!rpc) {
            fail("there is no registry RPC");
        }
        typedef ggml_backend_reg_t (*add_server_t)(const char *);
        auto add_server = (add_server_t) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server");
        for (const auto & server : o.servers) {
            ggml_backend_reg_t reg = add_server(server.c_str());
            if (!reg) {
                fail("no devices at " + server);
            }
            ggml_backend_register(reg);
        }
    }
    std::vector<ggml_backend_dev_t> devs;
    for (const auto & name : o.devices) {
        ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
        if (!dev) {
            fail("no device " + name);
        }
        devs.push_back(dev);
    }
    devs.push_back(nullptr);
    llama_model_params mp = llama_model_default_params();
    mp.devices = devs.data();
    mp.n_gpu_layers = o.devices.empty() ? 0 : 999;
    llama_model * model = llama_model_load_from_file(o.model.c_str(), mp);
    if (!model) {
        fail(o.model + " cannot be loaded");
    }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = o.prompt + o.tokens + 64;
    cp.n_threads = cp.n_threads_batch = 1;
    cp.offload_kqv = !o.cpu_cache;
    if (!o.flash.empty()) {
        cp.flash_attn_type = o.flash == "on" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    cp.type_k = cp.type_v = o.cache == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) {
        fail("no context");
    }
    int code = 0;
    std::string line;
    if (o.serve) {
        while (std::getline(std::cin, line)) {
            code = evaluate(model, ctx, o);
        }
    } else {
        code = evaluate(model, ctx, o);
    }
    llama_free(ctx);
    llama_model_free(model);
    return code == 0 ? 0 : 3;
}

int main(int argc, char ** argv) {
    ggml_backend_load_all();
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "devices") {
        return devices();
    }
    if (mode != "run" || argc < 3) {
        fail("usage: host devices | host run MODEL [OPTION...]");
    }
    options o;
    o.model = argv[2];
    for (int i = 3; i < argc; i++) {
        const std::string name = argv[i];
        auto value = [&]() -> std::string {
            if (++i >= argc) {
                fail(name + " needs a value");
            }
            return argv[i];
        };
        if (name == "--device") o.devices = split(value());
        else if (name == "--rpc") o.servers = split(value());
        else if (name == "--prompt") o.prompt = std::stoi(value());
        else if (name == "--tokens") o.tokens = std::stoi(value());
        else if (name == "--logits") o.logits = value();
        else if (name == "--flash") o.flash = value();
        else if (name == "--cache") o.cache = value();
        else if (name == "--cpu-cache") o.cpu_cache = true;
        else if (name == "--serve") o.serve = true;
        else fail("unknown option " + name);
    }
    return run(o);
}
