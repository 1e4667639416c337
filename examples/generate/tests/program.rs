//! Runs the built programs as processes.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use fanout::gguf::{Gguf, Writer};
use fanout::tensor::DType;
use fanout_testing::wrong_uses::{check, create_files, document, other_servers, rows};
use serde_json::Value;

/// This test also makes `cargo test` build the programs, which scripts then run without building them (`FANOUT_BUILT`).
#[test]
fn help_names_the_options() {
    for (program, option) in
        [(env!("CARGO_BIN_EXE_generate"), "--tokens"), (env!("CARGO_BIN_EXE_demo"), "--device <LIST>")]
    {
        let output = Command::new(program).arg("--help").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains(option), "{text}");
    }
}

/// The page of man and the completions of each shell have every option of `--help`.
#[test]
fn manual_and_completions_have_every_option() {
    let generate = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_generate")).args(args).output().unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("manual");
    let _ = fs::remove_dir_all(&folder);
    let written = generate(&["--manual", folder.to_str().unwrap()]);
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let help = String::from_utf8(generate(&["--help"]).stdout).unwrap();
    let lines = help.lines().filter(|line| line.trim_start().starts_with('-'));
    let options =
        lines.filter_map(|line| line.split_once("--")?.1.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).next());
    let options: Vec<&str> = options.filter(|name| !["help", "version"].contains(name)).collect();
    assert!(options.len() > 30 && options.contains(&"manual"), "{options:?}");
    for name in ["generate.1", "generate.bash", "_generate", "generate.fish"] {
        // Hyphens are escaped in the page, so that man prints them as they are typed; fish names an option without its hyphens.
        let text = fs::read_to_string(folder.join(name)).unwrap().replace(r"\-", "-");
        for option in &options {
            let found = text.contains(&format!("--{option}")) || text.contains(&format!("-l {option}"));
            assert!(found, "--{option} in {name}:\n{text}");
        }
    }
    let page = fs::read_to_string(folder.join("generate.1")).unwrap();
    assert!(page.contains("generate model.gguf ") && page.contains(".SH EXAMPLES"), "{page}");
    for (args, status, says) in [
        (&["--manual", "Cargo.toml"][..], 1, "generate: cannot write to Cargo.toml: File exists"),
        (&["model.gguf", "--manual", "manual"], 2, "cannot be used with"),
    ] {
        let output = generate(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(status) && text.contains(says), "{args:?}: {text}");
    }
}

/// A demo that keeps its model in `folder`.
fn demo(folder: impl AsRef<Path>) -> Command {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_demo"));
    demo.arg("--folder").arg(folder.as_ref());
    demo
}

#[test]
fn what_stops_the_demo_is_named() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("demo-stops");
    fs::create_dir_all(&folder).unwrap();
    for (options, status, says) in [
        (&["--tiny", "--folder=/dev/null/demo"][..], 1, "the model in /dev/null/demo: "),
        (&["--tiny", "--device=CPU,CUDA77"], 1, "a server does not serve: "),
        (&["--tiny", "--device=CPU,CUDA77"], 1, "CUDA77"),
        (&["--model=/nowhere.gguf"], 1, "/nowhere.gguf: "),
        (&["--device=CPU"], 2, "expected two devices"),
        (&["--device=CPU,"], 2, "expected two devices"),
        (&["--what"], 2, "--what"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_demo")).args(options).current_dir(&folder).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(status) && text.contains(says), "{options:?}: {text}");
    }
}

/// A demo may have mapped the model while another one makes it again. Each demo here ends when it has made the model.
#[test]
fn the_model_of_a_demo_is_replaced_and_never_changed() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("demo-model");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let stopped_by = || {
        let output = demo(&folder).args(["--tiny", "--device=CPU,CUDA77"]).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let (mapped, model) = (folder.join("mapped"), folder.join("tiny.gguf"));
    fs::write(&mapped, "of an earlier version").unwrap();
    for name in ["tiny.gguf", "tiny.partial"] {
        fs::hard_link(&mapped, folder.join(name)).unwrap();
    }
    let lock = File::create(folder.join("tiny.lock")).unwrap();
    lock.lock().unwrap();
    let message = stopped_by();
    assert!(message.contains("another demo is writing it"), "{message}");
    lock.unlock().unwrap();
    for _ in 0..2 {
        let message = stopped_by();
        assert!(message.contains("a server does not serve: "), "{message}");
        assert_eq!(fs::read_to_string(&mapped).unwrap(), "of an earlier version");
        assert!(fs::read(&model).unwrap().starts_with(b"GGUF") && !folder.join("tiny.partial").exists());
        // The second demo finds the model and needs no lock.
        lock.lock().unwrap();
    }
}

/// The vectorised CPU device and its divided products round differently than the exact one, but no node by as much as a wrong one.
#[test]
fn a_comparison_finds_nothing_on_healthy_devices() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("demo-compare");
    // Ends when it has made the model.
    demo(&folder).args(["--tiny", "--device=CPU,CUDA77"]).output().unwrap();
    for devices in [&["-d", "CPU"][..], &["-d", "CPU,CPU", "--split", "tensor"]] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
        program.arg(folder.join("tiny.gguf")).args(["--tokens", "1,4,9,16,25", "--compare", "-t", "1"]);
        let output = program.args(devices).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.ends_with("\n0 nodes differ by more than 1e-3\n") && !text.contains("<-"), "{text}");
    }
}

/// The kernel closes a server's standard input however its demo ends.
#[test]
fn a_server_of_the_demo_ends_with_its_standard_input() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_demo"))
        .args(["serve", "CPU", "1", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("listening on 127.0.0.1:"), "{line}");
    assert!(server.try_wait().unwrap().is_none(), "it serves");
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
}

/// The table, and what it shows in words; nothing else is printed, and standard error stays empty.
#[test]
fn the_demo_compares_four_runs() {
    let (folder, ours) = with_file("demo", &model());
    for (options, ends_with) in [
        (&["--tiny"][..], "tokens again.\n"),
        // With weights of 0, every token is the first one of the vocabulary.
        (&["--model", ours.to_str().unwrap()], "to the inn, where he\n"),
    ] {
        let output = demo(&folder).args(options).output().unwrap();
        let (text, messages) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && messages.is_empty(), "{text}{messages}");
        let rows: Vec<&str> = text.lines().filter(|line| line.contains("  yes ")).collect();
        assert_eq!(rows.len(), 3, "{text}");
        assert!(rows[2].starts_with("two servers, one killed "), "{text}");
        for says in ["model: ", "one device, all cores ", "Tokens: the same 64 ", "Network: ", "Recovery: "] {
            assert!(text.contains(says), "{says}: {text}");
        }
        assert!(text.ends_with(ends_with), "{text}");
    }
}

/// A model of one layer, whose weights are 0, with a vocabulary of five tokens.
fn model() -> Writer {
    const WIDTH: u64 = 32;
    let tokens = ["<unk>", "<s>", "</s>", "▁", "x"];
    let vocab = tokens.len() as u64;
    let mut writer = Writer::new()
        .text("general.architecture", "llama")
        .int("llama.block_count", 1)
        .int("llama.embedding_length", WIDTH as u32)
        .int("llama.attention.head_count", 1)
        .int("llama.attention.head_count_kv", 1)
        .int("llama.feed_forward_length", WIDTH as u32)
        .int("llama.context_length", 512)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .floats("tokenizer.ggml.scores", &[0.0; 5])
        .ints("tokenizer.ggml.token_type", &[2, 3, 3, 1, 1])
        .tensor("token_embd.weight", &[WIDTH, vocab], DType::F32)
        .tensor("output.weight", &[WIDTH, vocab], DType::F32);
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        writer = writer.tensor(&format!("{name}.weight"), &[WIDTH], DType::F32);
    }
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        writer = writer.tensor(&format!("blk.0.{name}.weight"), &[WIDTH, WIDTH], DType::F32);
    }
    writer
}

/// The folder of a test, and the file of the model in it.
fn with_file(test: &str, model: &Writer) -> (PathBuf, PathBuf) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("model.gguf");
    fs::write(&file, model.to_bytes().unwrap()).unwrap();
    (folder, file)
}

/// Also the plans of the scheduler, which have several lines: a line break within a record would let a server forge a line.
#[test]
fn each_line_of_the_log_is_a_record() {
    let (_, file) = with_file("log", &model());
    let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
    let output = program.arg(&file).args(["-p", "x", "-n", "1", "-d", "CPU", "--json", "-v"]).output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && log.contains("DEBUG] built a graph for "), "{log}");
    let is_record = |line: &str| line.starts_with('[') && line.contains("Z ") && line.contains("] ");
    let others: Vec<&str> = log.lines().filter(|line| !is_record(line)).collect();
    assert!(others.is_empty(), "{others:?}");
}

/// Prompts of different lengths, more than run at a time, on two devices in two groups: each reply has the tokens that it has alone,
/// in the order of the file.
#[test]
fn many_prompts_have_the_replies_that_each_has_alone() {
    let (folder, file) = with_file("prompts", &model());
    let list = folder.join("prompts.txt");
    let generate = |options: &[&str]| {
        let common = ["-n", "5", "--ignore-eos", "-d", "CPU,CPU", "--split", "1,1", "-t", "1", "--kv-type", "f32"];
        let output =
            Command::new(env!("CARGO_BIN_EXE_generate")).arg(&file).args(common).args(options).output().unwrap();
        let (text, messages) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{text}{messages}");
        text
    };
    let json = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    let prompts: Vec<String> = (0..7).map(|i| ["1", "4", "2", "3", "1", "2"][..1 + i * 5 % 6].join(",")).collect();
    fs::write(&list, prompts.iter().map(|ids| format!("tokens: {ids}\r\n\n")).collect::<String>()).unwrap();
    let list = list.to_str().unwrap();
    let all = json(generate(&["--prompts", list, "--parallel", "3", "--json"]));
    let alone: Vec<Value> =
        prompts.iter().map(|ids| json(generate(&["--tokens", ids, "--json"]))["tokens"].clone()).collect();
    assert_eq!(all["replies"], Value::Array(alone));
    // The text has the same replies in the order of the file.
    let text = generate(&["--prompts", list, "--parallel", "2", "--groups", "1"]);
    let numbers: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("--- ")).collect();
    assert_eq!(numbers, ["1", "2", "3", "4", "5", "6", "7"], "{text}");
    // The numbers by which tokens are drawn depend on the prompt's place, and not on what runs beside it.
    let drawn = |parallel| {
        let options = ["--prompts", list, "--parallel", parallel, "--json", "--temp", "1", "--seed", "5"];
        json(generate(&options))["replies"].clone()
    };
    assert_eq!(drawn("1"), drawn("4"));
}

/// A prompt with a damaged token fails alone: the others, which share its KV cache, have their replies, and the exit status is 1.
#[test]
fn a_prompt_with_invalid_logits_fails_alone() {
    let (folder, file) = with_file("invalid", &model());
    let list = folder.join("prompts.txt");
    let mut bytes = model().to_bytes().unwrap();
    let embeddings = Gguf::parse(&bytes).unwrap().tensors[0].clone();
    assert_eq!(embeddings.name, "token_embd.weight");
    // The embedding of the last token, 4.
    let row = embeddings.bytes.len() / embeddings.ne[1];
    let nan = f32::NAN.to_le_bytes();
    bytes[embeddings.bytes.start + 4 * row..embeddings.bytes.end]
        .chunks_exact_mut(4)
        .for_each(|x| x.copy_from_slice(&nan));
    fs::write(&file, bytes).unwrap();
    fs::write(&list, "tokens:1\ntokens:2,4\ntokens:3,1\n").unwrap();
    for devices in ["CPU", "CPU,CPU"] {
        let generate = |options: &[&str]| {
            let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
            program.arg(&file).arg("--prompts").arg(&list).args(["-n", "3", "--ignore-eos", "-t", "1", "-d", devices]);
            let output = program.args(options).output().unwrap();
            let messages = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{messages}");
            let reason = "generate: prompt 2: the logit of token 0 is NaN: ";
            assert!(messages.contains(reason) && messages.ends_with("generate: 1 of 3 prompts failed\n"), "{messages}");
            String::from_utf8(output.stdout).unwrap()
        };
        let report: Value = serde_json::from_str(&generate(&["--json"])).unwrap();
        assert_eq!(report["replies"], serde_json::json!([[0, 0, 0], [], [0, 0, 0]]));
        let errors = report["errors"].as_array().unwrap();
        assert!(errors[0].is_null() && errors[2].is_null(), "{errors:?}");
        assert!(errors[1].as_str().unwrap().starts_with("the logit of token 0 is NaN"), "{errors:?}");
        let text = generate(&[]);
        let heads: Vec<&str> = text.lines().filter(|line| line.starts_with("--- ")).collect();
        assert!(
            matches!(heads[..], ["--- 1", failed, "--- 3"] if failed.starts_with("--- 2 failed: the logit of token 0 ")),
            "{text}"
        );
    }
}

/// A model with an unknown tokenizer runs on token ids, and a warning says so, with one prompt and with many.
/// A server with the interface of Hugging Face, for the repository `o/m` with one model, until it has answered `requests`.
fn hub(model: Vec<u8>, requests: usize) -> (String, thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let thread = thread::spawn(move || {
        for _ in 0..requests {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let one = head.iter().any(|line| line.eq_ignore_ascii_case("range: bytes=0-0"));
            let (status, body) = match head[0].split(' ').nth(1).unwrap() {
                "/api/models/o/m/revision/main" => (
                    "200 OK",
                    br#"{"sha": "c0ffee", "siblings": [{"rfilename": "README.md"}, {"rfilename": "m.Q8_0.gguf"}]}"#
                        .to_vec(),
                ),
                "/o/m/resolve/main/m.Q8_0.gguf" => ("206 Partial Content", if one { vec![0] } else { model.clone() }),
                _ => ("404 Not Found", vec![]),
            };
            let (length, whole) = (body.len(), model.len());
            let head = format!(
                "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\nContent-Range: bytes 0-0/{whole}\r\n\
                 ETag: \"e1\"\r\nX-Repo-Commit: c0ffee\r\n\r\n"
            );
            stream.write_all(&[head.into_bytes(), body].concat()).unwrap();
        }
    });
    (endpoint, thread)
}

#[test]
fn a_model_is_downloaded_once() {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hub");
    let _ = fs::remove_dir_all(&home);
    let generate = |endpoint: &str, model: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
        for proxy in ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
            command.env_remove(proxy);
        }
        let output = command.args(["-hf", model, "--info"]).env("HF_ENDPOINT", endpoint).env("HF_HOME", &home).output();
        let output = output.unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.success(), out, err)
    };
    // The list, the size of the file, the file, and then the list alone.
    let (endpoint, thread) = hub(model().to_bytes().unwrap(), 4);
    for model in ["o/m", "o/m:q8_0"] {
        let (done, out, err) = generate(&endpoint, model);
        assert!(done && out.starts_with("architecture: llama"), "{out}{err}");
    }
    thread.join().unwrap();
    // Nothing listens any more.
    let (done, out, err) = generate(&endpoint, "o/m");
    assert!(done && out.starts_with("architecture: llama") && err.contains("is used as it is"), "{out}{err}");
    let (done, _, err) = generate(&endpoint, "o/other");
    assert!(!done && err.contains("without a network, give the path of a file instead"), "{err}");
    let (endpoint, thread) = hub(vec![], 2);
    for (model, says) in [("o/other", "is the name right?"), ("o/m:Q4_0", "no such model, but m.Q8_0.gguf")] {
        let (done, _, err) = generate(&endpoint, model);
        assert!(!done && err.contains(says), "{err}");
    }
    thread.join().unwrap();
    for (arguments, says) in
        [(&["-hf", "m", "--info"][..], "expected OWNER/NAME"), (&["-hf", "o/m", "x.gguf"], "cannot be used")]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_generate")).args(arguments).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && err.contains(says), "{err}");
    }
}

#[test]
fn models_are_listed() {
    let output = Command::new(env!("CARGO_BIN_EXE_generate")).arg("models").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("| gpt-oss |"), "{text}");
}

#[test]
fn an_unusable_tokenizer_causes_a_warning() {
    let (folder, file) = with_file("tokenizer", &model().text("tokenizer.ggml.model", "bert"));
    let list = folder.join("prompts.txt");
    fs::write(&list, "tokens:1\n").unwrap();
    for prompt in [["--tokens", "1"], ["--prompts", list.to_str().unwrap()]] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
        program.env_remove("RUST_LOG").arg(&file).args(prompt).args(["-n", "2", "-d", "CPU", "-t", "1"]);
        let output = program.output().unwrap();
        let (text, messages) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && text.contains("0 0"), "{prompt:?}: {text}{messages}");
        let warning = "the tokenizer cannot be used, so token ids are printed instead of text: ";
        assert!(messages.contains(warning), "{prompt:?}: {messages}");
    }
}

/// Doubts about a file are warnings and records of level info, once each.
#[test]
fn ignored_parts_of_a_file_are_named_once() {
    let model = model().int("llama.vocab_size", 6).int("llama.new_key", 1);
    let (_, file) = with_file("ignored", &model.tensor("blk.0.attn_rot_embd", &[16], DType::F32));
    let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
    let output =
        program.arg(&file).args(["--tokens", "1", "-n", "1", "-d", "CPU", "--log-level", "info"]).output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
    for record in [
        "WARN ] llama.vocab_size is 6, but the file has 5 tokens: the model is run with 5",
        "WARN ] this program does not know these keys of the file, and ignores them: llama.new_key",
        "INFO ] ignored tensors, which cannot change the text: blk.0.attn_rot_embd",
    ] {
        assert_eq!(log.matches(record).count(), 1, "{record}\n{log}");
    }
}

/// A message on the command line is the whole conversation where no other can be typed. Each end of the chat prints the reply and the report.
#[test]
fn a_chat_of_one_message_ends() {
    let (folder, file) = with_file("chat", &model());
    let template = folder.join("template.jinja");
    fs::write(&template, "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}").unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
    program
        .arg("-m")
        .arg(&file)
        .args(["--chat", "-p", "x", "-n", "3", "--echo", "-ngl", "0", "-t", "1", "--seed", "1"]);
    let output = program.arg("--chat-template").arg(&template).stdin(Stdio::piped()).output().unwrap();
    let (text, messages) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.starts_with("user:x ") && !text.contains("assistant:"), "{text}{messages}");
    assert!(messages.contains("CPU"), "{messages}");
}

/// Ctrl-C ends the reply; the program then prints its report, and ends by the signal, as shells expect.
#[test]
fn a_signal_ends_the_reply() {
    let (_, file) = with_file("signal", &model().text("tokenizer.ggml.model", "bert"));
    let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
    program.arg(&file).args(["--tokens", "1", "-n", "200000", "--ignore-eos", "-d", "CPU", "-t", "1"]);
    let mut program = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut text = program.stdout.take().unwrap();
    text.read_exact(&mut [0; 20]).unwrap();
    let number = program.id().to_string();
    assert!(Command::new("kill").args(["-INT", &number]).status().unwrap().success());
    let mut rest = String::new();
    text.read_to_string(&mut rest).unwrap();
    let output = program.wait_with_output().unwrap();
    let report = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.signal() == Some(2) && rest.ends_with('\n') && rest.len() < 2 * 200_000 - 20, "{report}");
    assert!(report.contains("tok"), "{report}");
}

/// A plan measures the devices; its command and `--auto` run with its placement, and give the same tokens.
#[test]
fn a_planned_run_reports_its_prediction() {
    let (folder, file) = with_file("plan it", &model());
    let report = |command: &mut Command| -> Value {
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_str(&text).unwrap()
    };
    let generate = |more: &[&str]| {
        let options =
            ["--tokens", "1,4", "-n", "3", "--ignore-eos", "--json", "-d", "CPU,CPU", "--mem", "64M", "-t", "1"];
        report(Command::new(env!("CARGO_BIN_EXE_generate")).arg(&file).args(options).args(more))
    };
    let plan = generate(&["--plan"]);
    // One layer with one head cannot be split.
    let stages = plan["best"]["stages"].as_array().unwrap();
    assert!(stages.len() == 1 && stages[0]["devices"].as_array().unwrap().len() == 1, "{plan}");
    let range = plan["best"]["gen_tok_s_range"].as_array().unwrap();
    let [slowest, fastest] = [&range[0], &range[1]].map(|rate| rate.as_f64().unwrap());
    let median = plan["best"]["gen_tok_s"].as_f64().unwrap();
    assert!(0.0 < slowest && slowest <= median && median <= fastest, "{plan}");
    assert_eq!(plan["devices"].as_array().unwrap().len(), 2, "{plan}");
    let command = plan["command"].as_str().unwrap();
    assert!(command.ends_with("--device CPU --mem 67108864 --threads 1"), "{command}");

    let pasted = report(Command::new("sh").args(["-c", command]));
    let (auto, both) = (generate(&["--auto"]), generate(&[]));
    assert_eq!((pasted["devices"].as_array().unwrap().len(), auto["devices"].as_array().unwrap().len()), (1, 1));
    assert_eq!((&pasted["tokens"], &auto["tokens"]), (&both["tokens"], &both["tokens"]));
    let rates = [&auto, &pasted].map(|report| report["predicted_gen_tok_s"].as_f64());
    assert!(rates[0].unwrap() > 0.0 && rates[1].is_none(), "{rates:?}");

    // Also for a file of prompts, whose command has the number of groups of sequences. Flags of a grouped option stay.
    let prompts = folder.join("prompts.txt");
    fs::write(&prompts, "tokens:1,4\ntokens:2\n").unwrap();
    let mut many = Command::new(env!("CARGO_BIN_EXE_generate"));
    many.arg(&file)
        .arg("--prompts")
        .arg(&prompts)
        .args(["-n", "3", "--json", "-vd", "CPU", "--mem", "256M", "-t", "1"]);
    let plan = report(many.arg("--plan"));
    let command = plan["command"].as_str().unwrap();
    assert!(plan["best"].is_object() && command.contains("--groups ") && command.contains(" -vd CPU "), "{command}");
    let pasted = report(Command::new("sh").args(["-c", command]));
    assert_eq!(pasted["replies"].as_array().unwrap().len(), 2, "{pasted}");
}

#[test]
fn every_message_is_that_of_the_document() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong-uses");
    create_files(&folder);
    let whole = model().to_bytes().unwrap();
    let mamba = Writer::new().text("general.architecture", "mamba").to_bytes().unwrap();
    let encoder = model().flag("llama.attention.causal", false).to_bytes().unwrap();
    let sinks = model().tensor("blk.0.attn_sinks.weight", &[1], DType::F32).to_bytes().unwrap();
    let refusing = "{{ raise_exception('no \u{1b}[1msystem prompt') }}";
    for (name, content) in [
        ("model.gguf", &whole[..]),
        ("cut.gguf", &whole[..60]),
        ("mamba.gguf", &mamba),
        ("encoder.gguf", &encoder),
        ("sinks.gguf", &sinks),
        ("open.jinja", b"{% for message in messages %}{{ message.content }"),
        ("refusing.jinja", refusing.as_bytes()),
        // In the place of a CUDA driver, so that one of this machine is not found.
        ("no-driver/libcuda.so", b"no library"),
        ("no-driver/libcuda.so.1", b"no library"),
    ] {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    }
    // The model itself is right.
    let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
    let output = program.args(["model.gguf", "-p", "x", "-n", "1", "-d", "CPU"]).current_dir(&folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = rows(&document(), "generate");
    assert!(rows.len() >= 30, "{} rows", rows.len());
    check(&rows, &folder, &other_servers(), |_| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_generate"));
        program.env("LD_LIBRARY_PATH", folder.join("no-driver")).env_remove("RUST_LOG");
        program
    });
}
