//! The manual: README.md, SETTINGS.md and INSTRUCTIONS.md must match the code.

use std::collections::BTreeSet;

use cudaemu::config::SETTINGS;

const README: &str = include_str!("../../README.md");

#[test]
fn the_list_of_instructions_matches_the_decoder() {
    let same = include_str!("../../INSTRUCTIONS.md") == cudaemu::isa::table().markdown();
    assert!(same, "run: cargo run -p cudaemu --example supported > crates/cudaemu/INSTRUCTIONS.md");
}

#[test]
fn the_list_of_settings_matches_the_code() {
    let rows: Vec<String> =
        SETTINGS.iter().map(|setting| format!("| `{}` | {} |", setting.name, setting.help)).collect();
    let table = rows.join("\n");
    assert!(include_str!("../../SETTINGS.md").ends_with(&format!("|---|---|\n{table}\n")), "it should be\n{table}");
    let known: BTreeSet<&str> = SETTINGS.iter().map(|setting| setting.name).collect();
    let named = README.split(|c: char| !(c.is_ascii_uppercase() || c == '_')).filter(|word| {
        let name = word.strip_prefix("CUDAEMU_");
        name.is_some_and(|name| !name.is_empty())
    });
    for name in named {
        assert!(known.contains(name), "the README names {name}, which is no setting");
    }
}

#[test]
fn the_report_in_the_readme_is_current() {
    let emulator = cudaemu::test::start("").unwrap();
    let report = {
        let context = cudarc::driver::CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let text = include_str!("../../kernels/ptx/elementwise.sm_80.ptx");
        let module = context.load_module(cudarc::nvrtc::Ptx::from_src(text)).unwrap();
        let kernel = module.load_function("vector_add").unwrap();
        let [a, b] = [0, 1].map(|_| stream.clone_htod(&[1f32; 1000]).unwrap());
        let mut c = stream.alloc_zeros::<f32>(1000).unwrap();
        use cudarc::driver::{LaunchConfig, PushKernelArg};
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&a).arg(&b).arg(&mut c).arg(&1001);
        #[allow(unsafe_code, reason = "cudarc's launch is unsafe")]
        // SAFETY: the arguments match the kernel's parameters; the test passes a count above the length of the vectors on
        // purpose.
        unsafe {
            launch.launch(LaunchConfig::for_num_elems(1001)).unwrap();
        }
        assert!(stream.synchronize().is_err());
        emulator.reports().remove(0)
    };
    // Ignores addresses, which differ from run to run.
    let parts: Vec<&str> = report.split([' ', '\n']).filter(|word| !word.starts_with("0x")).collect();
    let shown: Vec<&str> = README.split([' ', '\n']).filter(|word| !word.starts_with("0x")).collect();
    assert!(shown.windows(parts.len()).any(|part| part == parts), "the README should show\n{report}");
}
