//! scripts/roofline.py: the facts of a listing of machine code, and the comparison with recorded figures.

use super::root;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// A kernel with a loop from .L_x_0 to the branch, as `nvdisasm -hex -gp -c` prints it. Columns of each instruction here: PTX line
/// (0: that of the previous instruction), text, stall cycles, mask of the scoreboards that it waits for.
const KERNEL: &[(u32, &str, u64, u64)] = &[
    (10, "S2R R0, SR_TID.X", 2, 0),
    (11, "IMAD.WIDE R2, R0, 0x10, R4", 5, 1),
    (0, ".L_x_0:", 0, 0),
    (20, "LDG.E.128 R8, desc[UR4][R2.64]", 1, 0),
    (21, "@P1 LDG.E.U16.CONSTANT R12, desc[UR4][R2.64+0x10]", 1, 0),
    (22, "LDS.U.64 R14, [R7]", 1, 0),
    (23, "FFMA R6, R8, R12, R6", 4, 3),
    // Moved into the loop from line 11; the loop's own lines outvote it.
    (11, "IADD3 R3, R3, 0x1, RZ", 4, 0),
    (24, "ISETP.NE.AND P0, PT, R3, R5, PT", 13, 0),
    (25, "@P0 BRA `(.L_x_0)", 5, 0),
    (30, "STG.E desc[UR4][R2.64], R6", 1, 2),
    (31, "EXIT", 5, 0),
    (0, ".L_x_1:", 0, 0),
    (0, "BRA `(.L_x_1)", 0, 0),
];

/// The listing of a kernel.
fn listing(name: &str, kernel: &[(u32, &str, u64, u64)]) -> String {
    let mut text = format!(".text.{name}:\n");
    for (i, (line, code, stall, waits)) in kernel.iter().enumerate() {
        if code.ends_with(':') {
            text += &format!("{code}\n");
            continue;
        }
        if *line > 0 {
            text += &format!("\t//## File \".nv_debug_ptx_txt\", line {line}\n");
        }
        let high = stall << 41 | waits << 52;
        text += &format!("        /*{:04x}*/                   {code} ;   /* 0x0000000000007918 */\n", 16 * i);
        text += &format!("                                          /* 0x{high:016x} */\n");
    }
    text
}

fn python(script: &str, arguments: &[&Path]) -> Option<Output> {
    Command::new("python3").arg("--version").output().ok()?;
    Some(Command::new("python3").arg(root().join("scripts").join(script)).args(arguments).output().unwrap())
}

/// The facts of a kernel whose lines were executed so often. None without Python.
fn facts(name: &str, kernel: &[(u32, &str, u64, u64)], lines: &Value) -> Option<Value> {
    let folder = tempfile::tempdir().unwrap();
    let (code, counts) = (folder.path().join("listing"), folder.path().join("counts"));
    fs::write(&code, listing(name, kernel)).unwrap();
    fs::write(&counts, lines.to_string()).unwrap();
    let output = python("roofline_sass.py", &[&code, &counts])?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    Some(all[name].clone())
}

/// Four warps, each with 16 passes.
fn lines() -> Value {
    json!({"10": 4, "11": 4, "20": 64, "21": 64, "22": 64, "23": 64, "24": 64, "25": 64, "30": 4, "31": 4})
}

#[test]
fn the_main_loop_is_found_and_counted() {
    let Some(facts) = facts("kernel", KERNEL, &lines()) else { return };
    assert_eq!(facts["loop"], true);
    assert_eq!(facts["passes"], 64.0);
    let per_pass =
        json!({"instructions": 7.0, "stall_cycles": 29.0, "scoreboard_waits": 1.0, "global_load_bytes": 18.0});
    assert_eq!(facts["per_pass"], per_pass);
    assert_eq!(facts["loads"], json!({"LDG.128": 1.0, "LDG.16": 1.0, "LDS.64": 1.0}));
    let pipes = json!({"alu": 128.0, "control": 64.0, "fma": 64.0, "lsu": 192.0});
    assert_eq!((&facts["executed"], &facts["pipes"]), (&json!(448.0), &pipes));
    // Two instructions before the loop and two after it; the padding is not executed.
    assert_eq!(facts["body_executed"], 464.0);
    assert_eq!(facts["unknown"], json!([]));
}

/// What a Python expression gives as JSON, where `m` is scripts/roofline_model.py. None without Python.
fn model(expression: &str) -> Option<Value> {
    let code = format!("import json, roofline_model as m; print(json.dumps({expression}))");
    Command::new("python3").arg("--version").output().ok()?;
    let output = Command::new("python3").args(["-c", &code]).current_dir(root().join("scripts")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// The rates are those of src/cuda/gpu_rates.rs for the products of the model, of which GeForce boards have half.
#[cfg(feature = "cuda")]
#[test]
fn the_model_has_the_rates_of_its_products() {
    let Some(rates) = model("{t: [g.name, m.TENSOR[t]] for t, g in m.GPUS.items()}") else { return };
    let rates = rates.as_object().unwrap();
    assert_eq!(rates.len(), 5);
    for (target, product) in rates {
        let name = product[0].as_str().unwrap();
        let expected = fanout::cuda::gpu_rates(target.parse().unwrap(), name).unwrap();
        let expected = json!({"f16": expected.f16, "tf32": expected.tf32.unwrap(), "int8": expected.int8});
        assert_eq!(product[1], expected, "{name}");
    }
}

/// A multiprocessor serves a pass over shared memory per cycle; wide accesses take several, and a cp.async counts once per warp.
#[test]
fn shared_memory_is_modelled_by_passes() {
    let facts = r#"{"body_executed": 0, "body_pipes": {}, "body_tensor": {}, "load_bytes_at_a_time": 0}"#;
    let launch = r#"{"blocks": 132, "launches": 1, "threads": 132 * 128, "shared_passes": 132 * 198000, "shared_read": {"requests": 9e9}}"#;
    let Some(found) = model(&format!(r#"m.seconds("90", {launch}, {facts}, {{"blocks_per_sm": 1}})"#)) else { return };
    // 198000 passes at 1.98 GHz take 100 us at the peak rate.
    let expected = 100e-6 / 0.45 + 1.3e-6;
    assert!((found[0].as_f64().unwrap() / expected - 1.0).abs() < 1e-9, "{found}");
    assert_eq!(found[1], "shared");
}

/// Bytes from L2: the sectors that each block reads, and those that warps write.
#[test]
fn the_share_of_l2_counts_sectors_once_per_block() {
    let launch = r#"{"block_sectors": 300, "global_read": {"sectors": 9000}, "global_written": {"sectors": 20}}"#;
    let expression = format!(r#"[m.l2_bytes({launch}), m.l2_share("90", {launch}, 1e-9) * 5120 * 1.98]"#);
    let Some(found) = model(&expression) else { return };
    assert_eq!(found[0], 10_240);
    assert!((found[1].as_f64().unwrap() - 10_240.0).abs() < 1e-6, "{found}");
}

/// ptxas may unroll a loop: the instructions of a line share its executions.
#[test]
fn executions_are_divided_among_copies() {
    let mut unrolled = KERNEL[..10].to_vec();
    unrolled.splice(9..9, KERNEL[3..9].iter().copied());
    unrolled.extend(&KERNEL[10..]);
    let Some(facts) = facts("unrolled", &unrolled, &lines()) else { return };
    assert_eq!(facts["per_pass"]["instructions"], 13.0);
    assert_eq!((&facts["passes"], &facts["executed"]), (&json!(32.0), &json!(32.0 * 13.0)));
}

/// A line that becomes several instructions with the same opcode does not reduce the count of a block with an mma.
#[test]
fn blocks_with_mma_are_counted_by_it() {
    let mut kernel = KERNEL.to_vec();
    kernel[6] = (23, "HMMA.16816.F32 R6, R8, R12, R6", 4, 3);
    kernel.splice(7..8, [(21, "PRMT R3, R3, 0x1, RZ", 4, 0); 8]);
    let Some(facts) = facts("converts", &kernel, &lines()) else { return };
    assert_eq!((&facts["passes"], &facts["body_tensor"]), (&json!(64.0), &json!({"HMMA.16816": 64.0})));
    assert_eq!(facts["pipes"]["alu"], 64.0 * 9.0);
}

/// An opcode that no table lists is reported, and not counted silently.
#[test]
fn unknown_opcodes_are_named() {
    let mut kernel = KERNEL.to_vec();
    kernel[6].1 = "XYZZY R6, R8";
    let Some(facts) = facts("kernel", &kernel, &lines()) else { return };
    assert_eq!(facts["unknown"], json!(["XYZZY"]));
}

#[test]
fn figures_are_compared_with_the_recorded_ones() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["old", "new"].map(|name| folder.path().join(name));
    let row =
        |all: f64, registers: u32, us: f64| json!({"instr": {"all": all}, "registers": registers, "model": {"us": us}});
    let old = json!({"case | kernel": row(7.5, 40, 10.0)});
    let cases = [
        (old.clone(), None),
        (json!({"case | kernel": row(7.6, 40, 99.0)}), None), // less than 2 %; the model is not compared
        (json!({"case | kernel": row(7.7, 40, 10.0)}), Some("case | kernel: instr.all: recorded 7.5, now 7.7")),
        (json!({"case | kernel": row(7.3, 40, 10.0)}), Some("case | kernel: instr.all: recorded 7.5, now 7.3")),
        (json!({"case | kernel": row(7.5, 41, 10.0)}), Some("case | kernel: registers: recorded 40, now 41")),
        (json!({"case | other": row(7.5, 40, 10.0)}), Some("case | other: not recorded")),
        (json!({}), Some("case | kernel: recorded, but no longer found")),
    ];
    for (new, error) in cases {
        fs::write(&paths[0], old.to_string()).unwrap();
        fs::write(&paths[1], new.to_string()).unwrap();
        let Some(output) = python("roofline.py", &[Path::new("--compare"), &paths[0], &paths[1]]) else { return };
        let shown = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), error.is_none(), "{new}: {shown}");
        assert!(error.is_none_or(|error| shown.contains(error) && shown.contains("--write")), "{new}: {shown}");
    }
}
