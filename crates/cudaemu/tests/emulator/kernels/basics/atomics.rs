//! Atomics: the old values that the threads read and the final values must be the result of some order of the threads.

use std::sync::Arc;

use cudarc::driver::{CudaModule, CudaSlice};

use crate::gpu::{Gpu, assert_same, floats, launch, random};

const FILE: &str = "atomics.sm_80";
/// Threads per cell.
const THREADS_PER_CELL: usize = 6;
const THREADS: usize = 96;

/// The type of the values that an operation works on.
#[derive(Clone, Copy, PartialEq)]
enum ValueKind {
    Whole,
    Float,
    Double,
}

/// (name in the kernel's name, bytes, kind of values, operation on the old value and the operand)
type Row = (&'static str, usize, ValueKind, fn(u64, u64) -> u64);

const ROWS: [Row; 27] = [
    ("add_s32", 4, ValueKind::Whole, |a, b| a.wrapping_add(b)),
    ("add_u32", 4, ValueKind::Whole, |a, b| a.wrapping_add(b)),
    ("add_u64", 8, ValueKind::Whole, |a, b| a.wrapping_add(b)),
    ("add_f32", 4, ValueKind::Float, |a, b| (f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits().into()),
    ("add_f64", 8, ValueKind::Double, |a, b| (f64::from_bits(a) + f64::from_bits(b)).to_bits()),
    ("sub_s32", 4, ValueKind::Whole, |a, b| a.wrapping_sub(b)),
    ("min_s32", 4, ValueKind::Whole, |a, b| (a as i32).min(b as i32) as u64),
    ("min_u32", 4, ValueKind::Whole, |a, b| a.min(b)),
    ("min_s64", 8, ValueKind::Whole, |a, b| (a as i64).min(b as i64) as u64),
    ("min_u64", 8, ValueKind::Whole, |a, b| a.min(b)),
    ("max_s32", 4, ValueKind::Whole, |a, b| (a as i32).max(b as i32) as u64),
    ("max_u32", 4, ValueKind::Whole, |a, b| a.max(b)),
    ("max_s64", 8, ValueKind::Whole, |a, b| (a as i64).max(b as i64) as u64),
    ("max_u64", 8, ValueKind::Whole, |a, b| a.max(b)),
    ("and_u32", 4, ValueKind::Whole, |a, b| a & b),
    ("and_u64", 8, ValueKind::Whole, |a, b| a & b),
    ("or_u32", 4, ValueKind::Whole, |a, b| a | b),
    ("or_u64", 8, ValueKind::Whole, |a, b| a | b),
    ("xor_u32", 4, ValueKind::Whole, |a, b| a ^ b),
    ("xor_u64", 8, ValueKind::Whole, |a, b| a ^ b),
    ("inc_u32", 4, ValueKind::Whole, |a, b| if a >= b { 0 } else { a + 1 }),
    ("dec_u32", 4, ValueKind::Whole, |a, b| if a == 0 || a > b { b } else { a - 1 }),
    ("exch_u32", 4, ValueKind::Whole, |_, b| b),
    ("exch_f32", 4, ValueKind::Whole, |_, b| b),
    ("exch_u64", 8, ValueKind::Whole, |_, b| b),
    ("cas_u32", 4, ValueKind::Whole, |a, b| if a == 0 { b } else { a }),
    ("cas_u64", 8, ValueKind::Whole, |a, b| if a == 0 { b } else { a }),
];

impl ValueKind {
    /// Random bits of a value; small values are frequent, so that operations interact.
    fn sample(self, random: &mut fastrand::Rng, bytes: usize) -> u64 {
        let small = random.u32(..6);
        match self {
            Self::Float => f32::to_bits(small as f32 - 2.0).into(),
            Self::Double => f64::to_bits(f64::from(small) - 2.0),
            Self::Whole if random.bool() => small.into(),
            Self::Whole => random.u64(..) & mask(bytes),
        }
    }
}

fn mask(bytes: usize) -> u64 {
    u64::MAX >> (64 - 8 * bytes)
}

/// Cells or values of a given size, on the device.
struct DeviceNumbers {
    bytes: usize,
    values: Vec<u64>,
    memory: CudaSlice<u8>,
}

impl DeviceNumbers {
    fn new(gpu: &Gpu, bytes: usize, values: Vec<u64>) -> Self {
        let all: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()[..bytes].to_vec()).collect();
        Self { bytes, values, memory: gpu.upload(&all) }
    }

    /// The current values on the device.
    fn download(&self, gpu: &Gpu) -> Vec<u64> {
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        gpu.download(&self.memory).chunks(self.bytes).map(number).collect()
    }
}

/// Whether some order of the threads leads from `from` to the final value; each thread has an operand, and the old value it
/// read, if known.
fn some_order_explains(
    apply: &dyn Fn(u64, u64) -> u64,
    from: u64,
    to: u64,
    threads: &mut Vec<(u64, Option<u64>)>,
) -> bool {
    if threads.is_empty() {
        return from == to;
    }
    for index in 0..threads.len() {
        let (value, saw) = threads[index];
        if saw.is_none_or(|saw| saw == from) {
            threads.swap_remove(index);
            let found = some_order_explains(apply, apply(from, value), to, threads);
            threads.push((value, saw));
            let last = threads.len() - 1;
            threads.swap(index, last);
            if found {
                return true;
            }
        }
    }
    false
}

/// Runs a kernel on cells with random values, and checks each cell. In shared memory each block has its own cells.
fn check(gpu: &Gpu, module: &Arc<CudaModule>, kernel: &str, (_, bytes, kind, apply): Row, blocks: usize) {
    let mut random = random(bytes as u64);
    let shared = kernel.starts_with("shared");
    let slots = THREADS / THREADS_PER_CELL / if shared { blocks } else { 1 };
    let mut sample = |count: usize| (0..count).map(|_| kind.sample(&mut random, bytes)).collect::<Vec<_>>();
    let values = DeviceNumbers::new(gpu, bytes, sample(THREADS));
    let mut start = sample(THREADS / THREADS_PER_CELL);
    start.iter_mut().step_by(2).for_each(|cell| *cell = 0);
    let cells = DeviceNumbers::new(gpu, bytes, start);
    let old = DeviceNumbers::new(gpu, bytes, vec![0; THREADS]);
    let (grid, block) = (blocks as u32, (THREADS / blocks) as u32);
    if kernel.starts_with("reduce") {
        launch!(gpu, module, kernel, grid, block; &cells.memory, &values.memory, &(slots as i32));
    } else {
        launch!(gpu, module, kernel, grid, block; &cells.memory, &values.memory, &old.memory, &(slots as i32));
    }
    let (end, saw) = (cells.download(gpu), old.download(gpu));
    for (cell, (&from, &to)) in cells.values.iter().zip(&end).enumerate() {
        let mine =
            |thread: &usize| thread % slots == cell % slots && (!shared || thread / block as usize == cell / slots);
        let known = !kernel.starts_with("reduce");
        let mut threads: Vec<_> =
            (0..THREADS).filter(mine).map(|thread| (values.values[thread], known.then_some(saw[thread]))).collect();
        assert_eq!(threads.len(), THREADS_PER_CELL);
        let apply = |a, b| apply(a, b) & mask(bytes);
        assert!(
            some_order_explains(&apply, from, to, &mut threads),
            "{kernel}: cell {cell} went from {from:#x} to {to:#x} by {threads:x?}"
        );
    }
}

#[test]
fn every_atomic_function_gives_the_result_of_some_order() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    for row in ROWS {
        for kind in ["reduce", "fetch", "shared"] {
            check(&gpu, &module, &format!("{kind}_{}", row.0), row, 2);
        }
    }
}

#[test]
fn atomics_of_every_scope_give_the_result_of_some_order() {
    let rows = [
        ("fetch_add_block_u32", "add_u32", 1),
        ("fetch_add_system_u32", "add_u32", 3),
        ("fetch_max_block_s32", "max_s32", 1),
        ("fetch_cas_system_u64", "cas_u64", 3),
        ("fetch_add_block_f32", "add_f32", 1),
    ];
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    for (kernel, like, blocks) in rows {
        let row = ROWS.into_iter().find(|row| row.0 == like).unwrap();
        check(&gpu, &module, kernel, row, blocks);
    }
}

#[test]
fn atomics_built_by_cas_and_generic_atomics_lose_no_update() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values = floats(192, 1);
    let cells = gpu.upload(&[-2.0f32; 8]);
    launch!(gpu, module, "max_f32_by_cas", 3, 64; &cells, &gpu.upload(&values), &8);
    let largest = |cell: usize| values[cell..].iter().step_by(8).copied().fold(-2.0, f32::max);
    assert_same("max_f32_by_cas", &gpu.download(&cells), &(0..8).map(largest).collect::<Vec<_>>());

    let (cells, out) = (gpu.zeros::<i32>(1), gpu.alloc::<i32>(3));
    launch!(gpu, module, "generic_add", 3, 64; &cells, &out);
    assert_same("generic_add", &gpu.download(&cells), &[3 * (0..64).step_by(2).sum::<i32>()]);
    assert_same("generic_add", &gpu.download(&out), &[(1..64).step_by(2).sum::<i32>(); 3]);
}

#[test]
fn ordered_atomics_publish_earlier_writes() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let (data, flag, out) = (gpu.zeros::<i32>(1), gpu.zeros::<i32>(1), gpu.alloc::<i32>(2));
    launch!(gpu, module, "message_passing", 2, 32; &data, &flag, &out);
    assert_same("message_passing", &gpu.download(&out), &[7, 2]);

    let (cells, out) = (gpu.zeros::<u32>(2 + 32), gpu.alloc::<u32>(32));
    launch!(gpu, module, "ordered_builtins", 1, 32; &cells, &out);
    let want: Vec<u32> = [(0..32).sum(), u32::MAX].into_iter().chain(0..32).collect();
    assert_same("ordered_builtins", &gpu.download(&cells), &want);
    let mut threads: Vec<_> =
        gpu.download(&out).iter().zip(0..).map(|(saw, i)| (1 << i, Some(u64::from(saw.wrapping_sub(i))))).collect();
    assert!(some_order_explains(&|a, b| a | b, 0, u32::MAX.into(), &mut threads), "{threads:x?}");
}
