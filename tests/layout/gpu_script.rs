//! scripts/gpu.py on a machine without a GPU: its programs and nvidia-smi are stubs that print what a test wants.

use super::root;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

/// A part of the output of `nvidia-smi -q -x` for two GPUs: the first in the layout of driver 550, the second in that of
/// driver 470, with fewer fields.
const XML: &str = r#"<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>550.90.07</driver_version>
  <cuda_version>12.4</cuda_version>
  <gpu id="00000000:3B:00.0">
    <product_name>NVIDIA H200</product_name>
    <product_architecture>Hopper</product_architecture>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig></mig_mode>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>4</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
    </clocks_event_reasons>
    <clocks_event_reasons_counters>
      <clocks_event_reasons_counters_sw_power_cap>123 us</clocks_event_reasons_counters_sw_power_cap>
    </clocks_event_reasons_counters>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <ecc_errors>
      <volatile><sram_correctable>0</sram_correctable><dram_uncorrectable>2</dram_uncorrectable></volatile>
    </ecc_errors>
    <temperature><gpu_temp>61 C</gpu_temp></temperature>
    <gpu_power_readings><current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
    <clocks><sm_clock>1980 MHz</sm_clock><mem_clock>3201 MHz</mem_clock></clocks>
    <max_clocks><sm_clock>1981 MHz</sm_clock><mem_clock>3202 MHz</mem_clock></max_clocks>
    <applications_clocks><graphics_clock>1830 MHz</graphics_clock></applications_clocks>
  </gpu>
  <gpu id="00000000:AF:00.0">
    <product_name>NVIDIA A40</product_name>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_gpu_idle>Active</clocks_throttle_reason_gpu_idle>
    </clocks_throttle_reasons>
    <power_readings><power_limit>300.00 W</power_limit></power_readings>
  </gpu>
</nvidia_smi_log>
"#;

/// Writes an executable shell script.
fn stub(path: &Path, body: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs a Python script with the programs of a folder before all others.
fn python(script: &Path, programs: &Path, arguments: &[&str]) -> Output {
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
    Command::new("python3")
        .arg("-B")
        .arg(script)
        .args(arguments)
        .current_dir(programs)
        .env("PATH", path)
        .output()
        .unwrap()
}

/// These tests need Python, which a machine may lack.
fn has_python() -> bool {
    Command::new("python3").arg("--version").output().is_ok()
}

fn stdout_json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(at: &Value) -> &str {
    at.as_str().unwrap_or_else(|| panic!("{at} is no text"))
}

#[test]
fn properties_of_a_gpu_are_read_from_nvidia_smi() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("all.xml"), XML).unwrap();
    let matrix = "printf '\\033[4mGPU0\\tGPU1\\033[0m\\nGPU0 X OK\\nGPU1 OK X\\n'";
    let replies = format!("case \"$1\" in -q) cat all.xml ;; topo) {matrix} ;; *) exit 6 ;; esac");
    stub(&folder.path().join("nvidia-smi"), &replies);
    let script = root().join("scripts/nvidia_smi.py");

    let all = stdout_json(&python(&script, folder.path(), &["0000:3b:00.0"]));
    for (name, wanted) in [
        ("driver", "550.90.07"),
        ("CUDA", "12.4"),
        ("name", "NVIDIA H200"),
        ("architecture", "Hopper"),
        ("sm clock", "1980 MHz"),
        ("sm clock, maximum", "1981 MHz"),
        ("sm clock, applications", "1830 MHz"),
        ("memory clock", "3201 MHz"),
        ("memory clock, applications", "unknown"),
        ("power limit", "700.00 W"),
        ("persistence mode", "Enabled"),
        ("ECC", "Enabled"),
        ("MIG", "Disabled"),
        ("PCIe generation", "4"),
        ("PCIe generation, maximum", "5"),
        ("PCIe width", "8x"),
        ("display active", "unknown"),
        ("confidential computing", "unknown"),
    ] {
        assert_eq!(text(&all["facts"][name]), wanted, "{name}");
    }
    assert_eq!(text(&all["facts"]["ECC errors"]["volatile/dram_uncorrectable"]), "2");
    assert_eq!(all["facts"]["peer access, read"], serde_json::json!(["GPU0\tGPU1", "GPU0 X OK", "GPU1 OK X"]));
    assert_eq!(all["state"]["clocks lowered by"], serde_json::json!(["sw_power_cap"]));
    assert_eq!(text(&all["state"]["time with lowered clocks"]["sw_power_cap"]), "123 us");
    assert_eq!(text(&all["state"]["temperature"]), "61 C");

    let older = stdout_json(&python(&script, folder.path(), &["00000000:AF:00.0"]));
    assert_eq!(text(&older["facts"]["power limit"]), "300.00 W");
    assert_eq!(older["state"]["clocks lowered by"], serde_json::json!(["gpu_idle"]));
    assert_eq!(text(&older["facts"]["ECC"]), "unknown");
}

/// A driver that fails, prints something else, lists no such GPU, or is missing, gives unknown fields and no exception.
#[test]
fn properties_are_unknown_without_a_usable_nvidia_smi() {
    if !has_python() {
        return;
    }
    let script = root().join("scripts/nvidia_smi.py");
    for (body, pci) in [
        ("exit 9", "0000:3b:00.0"),
        ("echo 'No devices were found'", "0000:3b:00.0"),
        ("echo '<nvidia_smi_log><gpu id=\"00000000:01:00.0\"><clocks/></gpu></nvidia_smi_log>'", "0000:02:00.0"),
        ("echo '<nvidia_smi_log><gpu id=\"?\"><clocks/><ecc_errors/></gpu></nvidia_smi_log>'", "not an address"),
        ("printf '\\377\\376<nvidia'", "0000:3b:00.0"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        stub(&folder.path().join("nvidia-smi"), body);
        let all = stdout_json(&python(&script, folder.path(), &[pci]));
        assert_eq!(text(&all["facts"]["sm clock"]), "unknown", "{body}");
        assert_eq!(text(&all["state"]["clocks lowered by"]), "unknown", "{body}");
    }
}

/// Stubs of the kit's programs, of nvidia-smi and of compute-sanitizer, which finds errors in one family.
fn kit(folder: &Path) {
    let list = "echo '  CUDA0: NVIDIA H200, 143771 MiB, PCI 0000:3b:00.0, capability 9.0, 132 multiprocessors'";
    stub(&folder.join("bin/rpc-server"), list);
    stub(&folder.join("bin/ops"), "test \"$FANOUT_TEST_GPU\" = 1");
    let family = r#"{"capability":"8.0","family":"norm","compared":3,"failed":1,"left_out":0,"first_failures":["x"],"worst":null}"#;
    stub(&folder.join("bin/cuda"), &format!("echo 'test sweep ... '\necho '{family}'\nexit 101"));
    let step = r#"{"model":"Q4_K","shape":"a, 4096 positions","tokens":2,"layers":32,"same_bytes":true,"programmatic_us":900.0,"plain_us":1000.0,"floor_us":800.0,"tokens_per_s":2222.0}"#;
    stub(&folder.join("bin/kernel-bench"), &format!("echo '{step}' > \"$4\""));
    stub(
        &folder.join("bin/gpu-probes"),
        "echo '{\"probe\":\"modules\",\"answer\":{\"ms\":7}}'; test -d \"$CUDA_CACHE_PATH\"",
    );
    stub(&folder.join("nvidia-smi"), "cat all.xml");
    // racecheck of norm succeeds without a comparison.
    let sanitizer = format!(
        "echo '========= ERROR SUMMARY: 1 error'\n\
         test \"$2 $FANOUT_TEST_FAMILY\" = 'racecheck norm' || echo '{family}'\n\
         test \"$FANOUT_TEST_FAMILY\" != sort || exit 9"
    );
    stub(&folder.join("compute-sanitizer"), &sanitizer);
    fs::write(folder.join("all.xml"), XML).unwrap();
}

#[test]
fn a_gpu_run_reports_each_part() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    kit(folder.path());
    let script = root().join("scripts/gpu.py");
    let kit = folder.path().display().to_string();
    let (parts, tools) = ("token,ops,sweep,sanitizer,probes", "memcheck,racecheck");
    let options = ["--kit", &kit, "--parts", parts, "--tools", tools, "--families", "sort,norm", "--out", "results"];
    let output = python(&script, folder.path(), &options);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("failed: sweep, memcheck sort, racecheck sort, racecheck norm"), "{said}");

    let files = fs::read_dir(folder.path().join("results")).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files.collect();
    files.sort();
    let [json, markdown] = &files[..] else { panic!("{files:?}") };
    assert!(json.to_string_lossy().ends_with("-NVIDIA-H200-token-ops-sweep-sanitizer-probes.json"), "{json:?}");
    let report: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert_eq!(text(&report["facts"]["name"]), "NVIDIA H200");
    assert_eq!(report["parts"]["ops"]["rows"][0]["status"], 0);
    assert_eq!(report["parts"]["sweep"]["rows"][0]["families"][0]["compared"], 3);
    assert_eq!(text(&report["parts"]["sweep"]["after"]["temperature"]), "61 C");
    let rows = report["parts"]["sanitizer"]["rows"].as_array().unwrap();
    let cells: Vec<_> = rows.iter().map(|row| (text(&row["tool"]), text(&row["family"]), &row["status"])).collect();
    let (failed, passed, empty) = (Value::from(9), Value::from(0), Value::from("compared nothing"));
    let wanted = [
        ("memcheck", "sort", &failed),
        ("memcheck", "norm", &passed),
        ("racecheck", "sort", &failed),
        ("racecheck", "norm", &empty),
    ];
    assert_eq!(cells, wanted);
    let table = fs::read_to_string(markdown).unwrap();
    for line in [
        "| memcheck sort | 9; ERROR SUMMARY: 1 error; 3 compared |",
        "| ECC | Enabled |",
        "| Q4_K, 4096 positions | 2 | 32 | 900 | 1000 | 800 | 2222 | yes |",
        "FAILED: x",
        r#"| modules, warm cache | {"ms": 7} |"#,
    ] {
        assert!(table.contains(line), "no `{line}` in\n{table}");
    }
}

#[test]
fn a_gpu_run_refuses_unknown_parts() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for option in [["--parts", "ops,nosuch"], ["--tools", "leakcheck"], ["--families", "unary"]] {
        let output = python(&root().join("scripts/gpu.py"), folder.path(), &["--kit", ".", option[0], option[1]]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("is none of"), "{option:?}: {said}");
    }
}
