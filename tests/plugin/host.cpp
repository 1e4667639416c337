// A host of the plug-in: a program with llama.cpp's libraries, as small as it can be. It compiles with the headers of every
// version that the plug-in serves.
//
//     host devices                    prints the registries and their devices
//     host run MODEL [OPTION...]      evaluates a prompt and greedy tokens; prints the tokens, and writes the logits
//
//     --device A,B   devices of the model (default: none, the CPU computes)
//     --rpc SERVERS  servers that are added through the registry named RPC, as llama.cpp's --rpc does
//     --split MODE   none, layer (llama.cpp's default) or tensor; --tensor-split A,B: shares of the devices
//     --prompt N     tokens of the prompt (default 32), counted from a seed
//     --tokens N     greedy tokens after it (default 16)
//     --force FILE   evaluates these tokens instead of the greedy ones: what another run printed
//     --parallel N   sequences in each batch, with prompts of their own (default 1)
//     --save-restore saves the state of each sequence after the prompt, clears the memory, and restores it
//     --logits FILE  raw f32, all tokens in the order of the batches
//     --cpu-cache    the KV cache stays on the CPU
//     --flash on|off, --cache TYPE (f16, q8_0), --threads N (default 1)
//     --serve        runs a command per line of stdin, and prints a line for each: tokens or ok, and `error CODE` after a failure
//
// Commands: `run [N]` forgets the sequences, and evaluates the prompt (of N tokens) and the tokens; `continue N` evaluates N more;
// `save` and `restore` move the state of the sequences to this process and back; `clear` clears all memory.
//     --log          all of the host's log on stderr, not only warnings and the plug-in's lines
#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
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
    std::string model, logits, force, split_mode, cache = "f16", flash;
    std::vector<std::string> devices, servers, shares;
    int prompt = 32, tokens = 16, parallel = 1, threads = 1;
    bool cpu_cache = false, serve = false, save_restore = false, log = false;
};

static void quiet_log(enum ggml_log_level level, const char * text, void *) {
    static bool shown; // also the continuation of a line
    if (level != GGML_LOG_LEVEL_CONT) {
        shown = level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR || strstr(text, "fanout");
    }
    if (shown) {
        fputs(text, stderr);
    }
}

// The sequences of a context.
struct session {
    llama_context * ctx;
    const options & o;
    int vocab;
    int position = 0;                                      // of the next batch
    std::vector<std::vector<llama_token>> tokens;          // of each sequence, for the next batch
    std::vector<std::vector<uint8_t>> states;              // of each sequence, as saved
    int saved_position = 0;
    std::vector<std::vector<llama_token>> saved_tokens;
    FILE * logits = nullptr;

    // Forgets the sequences, as llama-server does after an error, and sets prompts of `length` tokens.
    void start(int length) {
        unsigned state = 1;
        tokens.assign(o.parallel, {});
        position = 0;
        for (int seq = 0; seq < o.parallel; seq++) {
            llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
            for (int i = 0; i < length; i++) {
                state = state * 1664525u + 1013904223u;
                tokens[seq].push_back((llama_token) ((state >> 8) % (unsigned) vocab));
            }
        }
    }

    // Evaluates the tokens, and prints and takes the greedy ones as the next, or those that are read from `forced`. Returns
    // llama_decode's code, after which nothing has changed if it is an error.
    int step(std::istream * forced) {
        const int length = (int) tokens[0].size();
        llama_batch batch = llama_batch_init(length * o.parallel, 0, 1);
        batch.n_tokens = length * o.parallel;
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = tokens[i / length][i % length];
            batch.pos[i] = position + i % length;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = i / length;
            batch.logits[i] = 1;
        }
        const int code = llama_decode(ctx, batch);
        llama_batch_free(batch);
        if (code != 0) {
            printf("error %d", code);
            return code;
        }
        position += length;
        for (int i = 0; logits && i < length * o.parallel; i++) {
            fwrite(llama_get_logits_ith(ctx, i), sizeof(float), vocab, logits);
        }
        for (int seq = 0; seq < o.parallel; seq++) {
            const float * row = llama_get_logits_ith(ctx, (seq + 1) * length - 1);
            int best = 0;
            for (int i = 1; i < vocab; i++) {
                best = row[i] > row[best] ? i : best;
            }
            printf("%d ", best);
            if (forced && !(*forced >> best)) {
                fail(o.force + " has too few tokens");
            }
            tokens[seq].assign(1, best);
        }
        fflush(stdout);
        return 0;
    }

    // Saves the state of each sequence in this process.
    bool save() {
        states.resize(o.parallel);
        for (int seq = 0; seq < o.parallel; seq++) {
            states[seq].resize(llama_state_seq_get_size(ctx, seq));
            if (llama_state_seq_get_data(ctx, states[seq].data(), states[seq].size(), seq) != states[seq].size()) {
                return false;
            }
        }
        saved_position = position;
        saved_tokens = tokens;
        return true;
    }

    bool restore() {
        for (int seq = 0; seq < (int) states.size(); seq++) {
            if (llama_state_seq_set_data(ctx, states[seq].data(), states[seq].size(), seq) == 0) {
                return false;
            }
        }
        position = saved_position;
        tokens = saved_tokens;
        return true;
    }

    // Evaluates the prompts and the tokens after them.
    int evaluate(int prompt) {
        std::ifstream forced(o.force);
        start(prompt);
        for (int i = 0; i <= o.tokens; i++) {
            const int code = step(o.force.empty() ? nullptr : &forced);
            if (code != 0) {
                return code;
            }
            if (i == 0 && o.save_restore) {
                const bool saved = save();
                llama_memory_clear(llama_get_memory(ctx), true);
                if (!saved || !restore()) {
                    fail("a sequence is not saved and restored");
                }
            }
        }
        return 0;
    }

    // Runs a command of --serve. A line of output ends with `error CODE` if the command has failed.
    void serve(const std::string & command) {
        bool done = true;
        if (command == "run") {
            evaluate(o.prompt);
        } else if (command.rfind("run ", 0) == 0) {
            evaluate(std::stoi(command.substr(4)));
        } else if (command.rfind("continue ", 0) == 0) {
            for (int i = std::stoi(command.substr(9)); i > 0 && step(nullptr) == 0; i--) {
            }
        } else if (command == "save") {
            done = save();
        } else if (command == "restore") {
            done = restore();
        } else if (command == "clear") {
            llama_memory_clear(llama_get_memory(ctx), true);
        } else {
            fail("unknown command " + command);
        }
        printf(!done ? "error\n" : command == "save" || command == "restore" || command == "clear" ? "ok\n" : "\n");
        fflush(stdout);
    }
};

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
    if (!o.split_mode.empty()) {
        mp.split_mode = o.split_mode == "none" ? LLAMA_SPLIT_MODE_NONE : o.split_mode == "tensor" ? LLAMA_SPLIT_MODE_TENSOR : LLAMA_SPLIT_MODE_LAYER;
    }
    std::vector<float> shares(llama_max_devices(), 0.0f);
    for (size_t i = 0; i < o.shares.size(); i++) {
        shares.at(i) = std::stof(o.shares[i]);
        mp.tensor_split = shares.data();
    }
    llama_model * model = llama_model_load_from_file(o.model.c_str(), mp);
    if (!model) {
        fail(o.model + " cannot be loaded");
    }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (o.prompt + o.tokens + 64) * o.parallel;
    cp.n_seq_max = o.parallel;
    cp.n_threads = cp.n_threads_batch = o.threads;
    cp.offload_kqv = !o.cpu_cache;
    if (!o.flash.empty()) {
        cp.flash_attn_type = o.flash == "on" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    cp.type_k = cp.type_v = o.cache == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) {
        fail("no context");
    }
    session all = { ctx, o, llama_vocab_n_tokens(llama_model_get_vocab(model)) };
    int code = 0;
    if (o.serve) {
        std::string line;
        while (std::getline(std::cin, line)) {
            all.serve(line);
        }
    } else {
        all.logits = o.logits.empty() ? nullptr : fopen(o.logits.c_str(), "wb");
        code = all.evaluate(o.prompt);
        printf("\n");
        if (all.logits) {
            fclose(all.logits);
        }
    }
    llama_free(ctx);
    llama_model_free(model);
    return code == 0 ? 0 : 3;
}

int main(int argc, char ** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "devices") {
        llama_log_set(quiet_log, nullptr);
        ggml_backend_load_all();
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
        else if (name == "--split") o.split_mode = value();
        else if (name == "--tensor-split") o.shares = split(value());
        else if (name == "--force") o.force = value();
        else if (name == "--parallel") o.parallel = std::stoi(value());
        else if (name == "--threads") o.threads = std::stoi(value());
        else if (name == "--save-restore") o.save_restore = true;
        else if (name == "--log") o.log = true;
        else if (name == "--cpu-cache") o.cpu_cache = true;
        else if (name == "--serve") o.serve = true;
        else fail("unknown option " + name);
    }
    if (!o.log) {
        llama_log_set(quiet_log, nullptr);
    }
    ggml_backend_load_all();
    return run(o);
}
