//! Counts of kernels (instructions, memory traffic, bank conflicts), compared with numbers computed by hand.

#![allow(unsafe_code, reason = "launches are unsafe calls of cudarc")]

use std::collections::BTreeMap;
use std::sync::Arc;

use cudaemu::counts::{DriverCounts, KernelCounts, SimulatedTime, Totals};
use cudaemu::decode::decode;
use cudaemu::exec::{self, ExecutorConfig};
use cudaemu::isa::Category;
use cudaemu::mem::AddressSpace;

use crate::gpu::{Gpu, launch, ptx};

const SETTINGS: &str = "CUDAEMU_COUNTS=on";

/// The number of a name in a kernel's counts: `"name": 12`, within an object if the name is `object.name`.
#[track_caller]
fn count(json: &str, kernel: &str, name: &str) -> u64 {
    let mut rest = json.split_once(&format!("\"{kernel}\": ")).unwrap_or_else(|| panic!("no {kernel} in {json}")).1;
    for part in name.split('.') {
        rest = rest.split_once(&format!("\"{part}\": ")).unwrap_or_else(|| panic!("no {name} in {json}")).1;
    }
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap_or_else(|_| panic!("{name} in {json}"))
}

#[track_caller]
fn check(json: &str, kernel: &str, expected: &[(&str, u64)]) {
    for &(name, number) in expected {
        assert_eq!(count(json, kernel, name), number, "{kernel}: {name}\n{json}");
    }
}

/// 1024 threads in 32 warps add 1000 elements; the last warp has 8 elements.
#[test]
fn a_vector_sum_is_counted_exactly() {
    let gpu = Gpu::with_settings(80, SETTINGS);
    let module = gpu.load("elementwise.sm_80");
    let (a, b, out) = (gpu.upload(&[1.0f32; 1000]), gpu.upload(&[2.0f32; 1000]), gpu.alloc::<f32>(1000));
    for launches in 1..=2 {
        launch!(gpu, module, "vector_add", 16, 64; &a, &b, &out, &1000);
        gpu.finish();
        let (all, inside) = (1024 * launches, 1000 * launches);
        let per_launch = [
            ("launches", launches),
            ("threads", all),
            // Per thread: four parameters, three special registers, the index, the test, the branch, the exit; 11 more for an
            // element.
            ("warp_instructions", (11 * 32 + 11 * 32) * launches),
            ("lane_instructions", 10 * all + 24 * launches + 11 * inside),
            ("load", 4 * all + 2 * inside),
            ("store", inside),
            ("float", inside),
            ("predicate", all),
            ("control", all + 24 * launches),
            ("global_read.requests", 64 * launches),
            ("global_read.bytes", 8 * inside),
            ("global_read.sectors", 250 * launches),
            ("global_read_distinct_bytes", 8 * inside),
            ("global_written.requests", 32 * launches),
            ("global_written.bytes", 4 * inside),
            ("global_written.sectors", 125 * launches),
            ("global_written_distinct_bytes", 4 * inside),
            ("shared_read.requests", 0),
            ("bank_conflicts", 0),
            ("local_read.bytes", 0),
        ];
        check(&gpu.emulator().counts_json(), "vector_add", &per_launch);
    }
    let json = gpu.emulator().counts_json();
    assert!(json.starts_with("{\"host_device_bytes\": 8000,"), "{json}");
    gpu.download(&out);
    let json = gpu.emulator().counts_json();
    assert!(json.starts_with("{\"host_device_bytes\": 12000,"), "{json}");
}

/// A transposition of 64 x 64 floats: each of 128 warp reads covers 128 bytes in four sectors.
#[test]
fn transpositions_count_sectors_and_bank_conflicts() {
    // Kernel, sectors written, requests to shared memory each way, conflicts.
    let rows = [
        ("transpose_naive", 128 * 32, 0, 0),
        ("transpose_tiled", 128 * 4, 128, 128 * 31),
        ("transpose_padded", 128 * 4, 128, 0),
        ("transpose_swizzled", 128 * 4, 128, 0),
    ];
    let gpu = Gpu::with_settings(80, SETTINGS);
    let module = gpu.load("transpose.sm_80");
    let (input, out) = (gpu.upload(&[1.0f32; 64 * 64]), gpu.alloc::<f32>(64 * 64));
    for (kernel, written, shared, conflicts) in rows {
        launch!(gpu, module, kernel, (2, 2), (32, 8); &input, &out, &64, &64);
        gpu.finish();
        let expected = [
            ("global_read.requests", 128),
            ("global_read.bytes", 16384),
            ("global_read.sectors", 512),
            ("global_written.requests", 128),
            ("global_written.bytes", 16384),
            ("global_written.sectors", written),
            ("global_written_distinct_bytes", 16384),
            ("shared_read.requests", shared),
            ("shared_read.bytes", 128 * shared),
            ("shared_written.requests", shared),
            ("shared_passes", 2 * shared + conflicts),
            ("bank_conflicts", conflicts),
        ];
        check(&gpu.emulator().counts_json(), kernel, &expected);
    }
}

/// Stride and offset determine the number of sectors of a warp's words, and how many bytes are read more than once.
#[test]
fn strided_loads_count_sectors_and_distinct_bytes() {
    let gpu = Gpu::with_settings(80, SETTINGS);
    let module = gpu.load("elementwise.sm_80");
    let (input, out) = (gpu.upload(&[1; 4096]), gpu.alloc::<i32>(64));
    let mut before = [0; 2];
    // Stride and offset in words, then sectors and distinct bytes of two warps.
    for (stride, offset, sectors, distinct) in
        [(1i64, 0i64, 8, 256), (1, 1, 10, 256), (2, 0, 16, 256), (8, 0, 64, 256), (33, 0, 64, 256), (0, 5, 2, 4)]
    {
        launch!(gpu, module, "gather_strided", 1, 64; &input, &out, &64, &stride, &offset);
        gpu.finish();
        let json = gpu.emulator().counts_json();
        let now =
            ["global_read.sectors", "global_read_distinct_bytes"].map(|name| count(&json, "gather_strided", name));
        assert_eq!([now[0] - before[0], now[1] - before[1]], [sectors, distinct], "stride {stride}, offset {offset}");
        before = now;
    }
}

/// Each of 64 threads writes an array of eight words in two stores, and reads one word.
#[test]
fn local_arrays_are_counted_as_local_traffic() {
    let gpu = Gpu::with_settings(80, SETTINGS);
    let module = gpu.load("out_of_bounds_local.sm_80");
    let (input, index) = (gpu.upload(&[1, 2, 3, 4, 5, 6, 7, 8]), gpu.upload(&[3; 64]));
    launch!(gpu, module, "local_array_clean", 1, 64; &input, &index, &gpu.alloc::<i32>(64));
    gpu.finish();
    let expected = [
        ("local_written.requests", 4),
        ("local_written.bytes", 64 * 32),
        ("local_read.requests", 2),
        ("local_read.bytes", 64 * 4),
        // Each of the two warps reads eight words (one request each, the same word in all lanes) and its indices.
        ("global_read.requests", 2 * 9),
        ("global_read.bytes", 64 * 36),
        ("global_read.sectors", 2 * 8 + 8),
        ("global_read_distinct_bytes", 32 + 256),
    ];
    check(&gpu.emulator().counts_json(), "local_array_clean", &expected);
}

/// The counts, as a table and as JSON, do not depend on the number of host threads that execute blocks.
#[test]
fn table_and_json_are_deterministic() {
    let text = ptx("transpose.sm_80");
    let code = Arc::new(decode(&cudaemu::ptx::parse(&text).unwrap(), &text).unwrap());
    let function = code.functions.iter().position(|function| &*function.name == "transpose_tiled").unwrap();
    let run = |threads| {
        let space = AddressSpace::new(&[1 << 20]).unwrap();
        let [input, out] = [0, 1].map(|_| space.alloc(0, 16384, "test").unwrap().base());
        space.snapshot().write(input, &[0; 16384]).unwrap();
        let mut params = [input, out].map(u64::to_le_bytes).concat();
        params.extend([64u32, 64].map(u32::to_le_bytes).concat());
        let launch = exec::Launch {
            code: Arc::clone(&code),
            function,
            grid: [2, 2, 1],
            block: [32, 8, 1],
            dynamic_shared: 0,
            params: params.into(),
            globals: vec![0; code.globals.len()].into(),
            device: 0,
            peers: 1,
            id: 1,
        };
        let machine = ExecutorConfig {
            sms: 4,
            threads,
            max_instructions: 1 << 24,
            report_only: false,
            local_bytes: 1024,
            counting: true,
            footprint: true,
        };
        let outcome = exec::run_grid(&launch, &space.snapshot(), &machine);
        outcome.result.clone().unwrap();
        let mut totals = Totals::default();
        totals.add(vec![("transpose_tiled".to_owned(), KernelCounts::of(&launch, &outcome))], 32768);
        totals
    };
    let json_of = |totals: &Totals| totals.json(&BTreeMap::new(), &DriverCounts::default(), &SimulatedTime::default());
    let totals = run(1);
    for threads in [1, 2, 7] {
        let again = run(threads);
        assert_eq!((json_of(&again), again.table()), (json_of(&totals), totals.table()), "{threads} threads");
    }
    let json = json_of(&totals);
    let lines = json.split_once("\"warp_instructions_by_line\": {").unwrap().1.split_once('}').unwrap().0;
    let executed: u64 = lines.split(", ").map(|line| line.split_once(": ").unwrap().1.parse::<u64>().unwrap()).sum();
    assert!(json.contains(&format!("\"warp_instructions\": {executed}, ")), "each warp instruction has a line: {json}");
    assert!(json.contains("\"launches\": 1, \"blocks\": 4, "), "{json}");
    let table = totals.table();
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["bytes", "between", "host", "and", "devices:", "32768"]);
    let (kernel, rest) = lines[2].split_first().unwrap();
    assert_eq!(*kernel, "transpose_tiled");
    let rest: Vec<&str> = rest.iter().copied().filter(|&word| word != "|").collect();
    // Launches, instructions, elements, instructions per element; bytes read, sectors of them, distinct; the same for writes;
    // conflicts; local bytes.
    assert_eq!((rest[0], rest[2]), ("1", "4096"));
    assert_eq!(rest[4..], ["16384", "16384", "16384", "16384", "16384", "16384", "3968", "0"]);
    let instructions: f64 = rest[1].parse().unwrap();
    assert_eq!(rest[3], format!("{:.1}", instructions / 4096.0));
    assert_eq!(lines[3][0], "transpose_tiled:");
    assert!(Category::Integer < Category::Other, "classes come in a fixed order");
}
