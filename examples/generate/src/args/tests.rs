//! Tests of the command line.

use super::*;
use clap::CommandFactory;
use fanout::gguf::{Gguf, Writer};

fn parse(line: &str) -> Result<Args, String> {
    let words = ["generate", "model.gguf"].into_iter().chain(line.split_whitespace());
    Args::try_parse_from(words).map_err(|e| e.to_string())
}

#[test]
fn the_clap_definition_is_consistent() {
    Args::command().debug_assert();
}

#[test]
fn omitted_options_have_defaults() {
    let args = parse("-p Once").unwrap();
    assert_eq!((args.ubatch, args.predict, args.kv_type, args.temp), (512, None, KvType::F16, 0.0));
    assert_eq!((args.depth(1, 1), args.depth(2, 1), args.depth(2, 2)), (1, 4, 1));
    let one = |device| TensorGroup::new(vec![device], vec![1.0]).unwrap();
    assert_eq!(args.tensor_groups(2), Ok((vec![one(0), one(1)], None)));
    assert_eq!((args.context(10, 9000), args.predict(10, 256)), (Ok(74), Ok(64)));
    assert_eq!(args.kv_type.dtype(), DType::F16);
}

#[test]
fn given_options_override_the_defaults() {
    let args =
        parse("--tokens 1,5,9 -n 8 -d CPU,CPU --split 3,1 --ubatch 4 --depth 2 --ctx 32 --kv-type f32 --mem 1G,2G");
    let args = args.unwrap();
    assert_eq!(args.tokens, Some(vec![1, 5, 9]));
    assert_eq!(args.tensor_groups(2).unwrap().1, Some(vec![0.75, 0.25]));
    assert_eq!((args.ubatch, args.depth(2, 1), args.context(24, 9000)), (4, 2, Ok(32)));
    assert_eq!((args.kv_type.dtype(), args.mem), (DType::F32, vec![1 << 30, 2 << 30]));
    let args = parse("-p x --temp 0.8 --top-p 0.9 --seed 7").unwrap();
    assert_eq!((args.temperature, args.top_p, args.seed), (Some(0.8), Some(0.9), Some(7)));
    let seconds = |line| parse(line).map(|args| (args.retry().map(|d| d.as_secs()), args.rpc_timeout().as_secs()));
    assert_eq!(seconds("-p x"), Ok((None, 60)));
    assert_eq!(seconds("-p x --rpc a:1,b:2 --retry --json"), Ok((Some(60), 60)));
    assert_eq!(seconds("-p x --retry 7 --rpc-timeout 2"), Ok((Some(7), 2)));
}

#[test]
fn a_chat_replies_until_the_context_is_full() {
    let args = parse("--chat --system s").unwrap();
    assert_eq!((args.context(0, 9000), args.context(0, 512), args.context(5000, 9000)), (Ok(4096), Ok(512), Ok(5001)));
    assert_eq!((args.predict(96, 4096), args.predict(4095, 4096)), (Ok(4000), Ok(1)));
    assert_eq!(args.predict(4096, 4096), Err(ArgsError::ContextFull { ctx: 4096, prompt: 4096 }));
    assert_eq!(parse("--chat -n 7").unwrap().predict(96, 4096), Ok(7));
}

/// The options, the keys of the model, and what is used: temperature, top-k, top-p, min-p, repeat penalty and its tokens.
#[test]
fn a_chat_samples_by_options_then_by_the_model_then_as_llama_cpp() {
    type Chosen = (f32, Option<usize>, Option<f32>, Option<f32>, Option<f32>, usize);
    let default: Chosen = (0.8, Some(40), Some(0.95), Some(0.05), Some(1.0), 64);
    let plain = Writer::new();
    let model = plain
        .clone()
        .float("general.sampling.temp", 0.2)
        .int("general.sampling.top_k", 20)
        .float("general.sampling.min_p", 0.0)
        .float("general.sampling.penalty_repeat", 1.25)
        .int("general.sampling.penalty_last_n", 7);
    let off = plain
        .clone()
        .float("general.sampling.top_k", -1.0)
        .float("general.sampling.temp", -1.0)
        .float("general.sampling.top_p", 1.5)
        .float("general.sampling.min_p", -0.5)
        .float("general.sampling.penalty_last_n", -1.0);
    let senseless = plain
        .clone()
        .text("general.sampling.top_k", "many")
        .float("general.sampling.temp", f32::NAN)
        .float("general.sampling.penalty_repeat", -3.0)
        .flag("general.sampling.penalty_last_n", true);
    let recommended = (0.2, Some(20), Some(0.95), Some(0.0), Some(1.25), 7);
    let all = Some(usize::MAX);
    let cases: [(&str, &Writer, Chosen); 9] = [
        ("-p x", &plain, (0.0, None, None, None, None, 64)),
        ("-p x", &model, (0.0, None, None, None, None, 64)),
        ("-p x --temp 0.5 --min-p 0.1 --repeat-penalty 1.1", &model, (0.5, None, None, Some(0.1), Some(1.1), 64)),
        ("--chat", &plain, default),
        ("--chat", &model, recommended),
        ("--chat --temp 0", &model, (0.0, recommended.1, recommended.2, recommended.3, recommended.4, 7)),
        ("--chat --top-k 0 --top-p 1 --repeat-penalty 1", &model, (0.2, all, Some(1.0), Some(0.0), Some(1.0), 7)),
        ("--chat", &off, (0.0, all, Some(1.0), Some(0.0), Some(1.0), usize::MAX)),
        ("--chat", &senseless, default),
    ];
    for (line, file, expected) in cases {
        let bytes = file.to_bytes().unwrap();
        let args = parse(line).unwrap().with_sampling(&Gguf::parse(&bytes).unwrap().metadata);
        let top_k = args.top_k.map(NonZeroUsize::get);
        let chosen = (args.temp, top_k, args.top_p, args.min_p, args.repeat_penalty, args.penalised_tokens);
        assert_eq!(chosen, expected, "{line}");
    }
}

#[test]
fn options_have_the_spelling_of_llama_cpp() {
    let words = |line: &str| Args::try_parse_from(["generate"].into_iter().chain(line.split_whitespace()));
    for line in ["m.gguf -p x", "-m m.gguf -p x", "-p x --model m.gguf"] {
        assert_eq!(words(line).unwrap().model(), Path::new("m.gguf"), "{line}");
    }
    for (line, expected) in
        [("-p x", "required arguments were not provided"), ("m.gguf -p x -m n.gguf", "cannot be used")]
    {
        let error = words(line).unwrap_err().to_string();
        assert!(error.contains(expected), "{line}: {error}");
    }
    let devices = |line| parse(line).unwrap().devices([].into_iter());
    let cpu = Ok(Some("CPU".to_owned()));
    for (line, expected) in [
        ("-p x --gpu-layers 99", &Ok(None)),
        ("-p x --n-gpu-layers -1", &Ok(None)),
        ("-p x --gpu-layers all", &Ok(None)),
        ("-p x --gpu-layers 0", &cpu),
        ("-p x --gpu-layers 0 -d 1", &Ok(Some("1".to_owned()))),
    ] {
        assert_eq!(&devices(line), expected, "{line}");
    }
    assert_eq!(parse("-p x --stop a --stop b").unwrap().stop, ["a", "b"]);
}

#[test]
fn tensor_splits_make_groups_of_consecutive_devices() {
    let groups = |line: &str, devices| {
        let (groups, shares) = parse(line).unwrap().tensor_groups(devices).unwrap();
        assert_eq!(shares, None);
        groups.iter().map(|group| (group.devices().to_vec(), group.shares().to_vec())).collect::<Vec<_>>()
    };
    assert_eq!(groups("-p x --split tensor", 3), [(vec![0, 1, 2], vec![1.0; 3])]);
    assert_eq!(groups("-p x --split tensor=3,1", 2), [(vec![0, 1], vec![3.0, 1.0])]);
    let two = [(vec![0, 1], vec![1.0, 2.0]), (vec![2, 3], vec![1.0, 1.0])];
    assert_eq!(groups("-p x --split tensor=1,2/1,1", 4), two);
    let (groups, shares) = parse("-p x --split tensor=6:1,2/2:1,1").unwrap().tensor_groups(4).unwrap();
    assert_eq!((groups.len(), groups[0].shares().to_vec(), shares), (2, vec![1.0, 2.0], Some(vec![0.75, 0.25])));
}

#[test]
fn errors_name_the_wrong_argument() {
    let cases = [
        ("", "--prompt <TEXT>"),
        ("-p x --tokens 1", "cannot be used with '--tokens <IDS>'"),
        ("--tokens 1,x", "invalid value 'x' for '--tokens <IDS>'"),
        ("-p x --top-p 0.9", "--temp <T>"),
        ("-p x --seed 1", "--temp <T>"),
        ("-p x --temp 1 --top-p 1.5", "expected a probability, above 0 and up to 1"),
        ("-p x --temp -1", "expected a temperature, 0 or at least 0.000001"),
        ("-p x --min-p 0.1", "--temp <T>"),
        ("--chat --min-p 2", "expected a number from 0 to 1"),
        ("-p x --repeat-penalty 0", "expected a number from 0.01 to 100"),
        ("-p x --gpu-layers x", "expected a number, auto or all"),
        ("-p x --stop=", "a value is required for '--stop <TEXT>'"),
        ("-p x --stop y --json", "cannot be used with"),
        ("-p x --no-thinking", "--chat"),
        ("-p x --temp nan", "expected a temperature, 0 or at least 0.000001"),
        ("-p x --split 3,-1", "expected a share, 0 or more"),
        ("-p x --ubatch 0", "0 is not in 1..=65536"),
        ("-p x --depth 17", "17 is not in 1..=16"),
        ("-p x --kv-type q4_0", "[possible values: f32, f16, q8_0]"),
        ("-p x --split tensors", "expected tensor, tensor=SHARES or shares"),
        ("-p x --split tensor=1,0", "expected a share above 0"),
        ("-p x --split tensor=1/", "expected a share above 0"),
        ("-p x --split tensor=2:1/1", "expected LAYERS: for every group, or for none"),
        ("-p x --split tensor=0:1/1:1", "expected a share above 0"),
        ("-p x --plan --split 1,1", "cannot be used with"),
        ("-p x --plan --auto", "cannot be used with"),
        ("-p x --rpc CPU", "for '--rpc <LIST>': CPU is a device of this machine: give it to --device"),
        ("-p x --rpc 0", "0 is a device of this machine"),
        ("-p x --rpc host:1,CUDA1", "CUDA1 is a device of this machine"),
        ("-p x --rpc 50052:1", "50052 is a device of this machine"),
        ("-p x --rpc=", "for '--rpc <LIST>': expected an endpoint such as 10.0.0.5:50052 or [fd00::5]:50052, got \"\""),
        ("-p x --rpc host:1,", "expected an endpoint"),
        ("-p x --rpc host:", "expected an endpoint"),
        ("-p x --rpc host/0", "expected an endpoint"),
        ("-p x --rpc host:65536", "expected an endpoint"),
        ("-p x --rpc host:1/0", "expected an endpoint"),
        ("-p x --mem 0", "must be more than 0 bytes"),
        ("-p x --log-level loud", "expected off, error, warn, info, debug or trace, got \"loud\""),
        ("-p x --retry 0", "0 is not in 1..=86400"),
        ("-p x --rpc-timeout 0", "0 is not in 1..=86400"),
        ("-p x --compare --retry", "cannot be used with"),
        ("-p x --compare --json", "cannot be used with"),
        ("-p x --info", "cannot be used with"),
        ("-p x --system y", "--chat"),
        ("-p x --chat-template y", "--chat"),
        ("--tokens 1 --chat", "cannot be used with"),
        ("--chat --compare", "cannot be used with"),
        ("-p x --echo --json", "cannot be used with"),
        ("-p x -v --log-level trace", "cannot be used with"),
    ];
    for (line, expected) in cases {
        let error = parse(line).err().unwrap_or_default();
        assert!(error.contains(expected), "{line}: {error}\n{expected}");
    }
}

#[test]
fn servers_precede_devices_and_reject_mem() {
    let list = |line: &str| {
        let args = parse(line).unwrap();
        let servers: Vec<_> = args.rpc.iter().map(ToString::to_string).collect();
        args.devices(servers.iter().map(String::as_str))
    };
    assert_eq!(list("-p x"), Ok(None));
    assert_eq!(list("-p x --mem 1G"), Ok(None));
    let both = "-p x -d CPU,c:3/0 --rpc a:1,[::1]:2 --mem 1G";
    assert_eq!(list(both), Ok(Some("a:1,[::1]:2,CPU,c:3/0".to_owned())));
    let ports = "-p x --rpc a,10.0.0.5,[::1],[fd00::5],b.c:7";
    assert_eq!(list(ports), Ok(Some("a:50052,10.0.0.5:50052,[::1]:50052,[fd00::5]:50052,b.c:7".to_owned())));
    for line in ["-p x --rpc a:1 --mem 1K", "-p x --rpc a:1,b:2 --mem 1G,2G", "-p x -d a:1/0,b:2 --mem 1G"] {
        assert_eq!(list(line), Err(ArgsError::Memory), "{line}");
    }
}

#[test]
fn arguments_that_do_not_match_devices_or_model_are_rejected() {
    let args = parse("-p x --split 3,1 --ctx 70").unwrap();
    assert_eq!(args.tensor_groups(1), Err(ArgsError::Shares { shares: 2, devices: 1 }));
    assert_eq!(parse("-p x --split 0,0").unwrap().tensor_groups(2), Err(ArgsError::NoShare));
    assert_eq!(
        parse("-p x --split tensor=1,1").unwrap().tensor_groups(3),
        Err(ArgsError::Shares { shares: 2, devices: 3 })
    );
    let error = args.context(10, 9000).unwrap_err().to_string();
    assert_eq!(
        error,
        "--ctx 70 is less than 10 tokens of the prompt and 64 of --predict: 74 are needed; give a larger --ctx, or a smaller --predict"
    );
    assert_eq!(args.predict(257, 256), Err(ArgsError::ContextFull { ctx: 256, prompt: 257 }));
    assert_eq!(args.check_prompt(&[], 8), Err(ArgsError::NoPrompt));
    assert_eq!(args.check_prompt(&[7, 8], 8), Err(ArgsError::Token { token: 8, vocab: 8 }));
    assert_eq!(args.check_prompt(&[7, 0], 8), Ok(()));
}
