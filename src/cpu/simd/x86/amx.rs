//! Micro-kernel for BF16 by AMX, from Sapphire Rapids on: sums stay in tiles. The instructions are written out, because the standard library
//! has none for them yet.

use super::simd_ops::Avx512Ops;
use crate::cpu::panel::PANEL_ROWS;
use crate::cpu::simd::simd_ops::SimdOps;
use crate::cpu::simd::{MicroKernelFn, TileOutput};
use crate::tensor::DType;
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Columns, or rows, of a tile.
const TILE: usize = 16;

/// Fewest columns for which a tile pays, which takes the time of sixteen.
const MIN_COLUMNS: usize = 7;

/// Whether this process may use AMX-BF16. Linux gives the tiles' 8 KiB of state only to processes that ask for it.
pub(super) fn is_available() -> bool {
    const TILE_BIT: u32 = 1 << 24;
    const BF16_BIT: u32 = 1 << 22;
    const ALL: u32 = TILE_BIT | BF16_BIT;
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| cfg!(target_os = "linux") && __cpuid_count(7, 0).edx & ALL == ALL && may_use_tiles())
}

/// Asks the system for the state of the tiles.
fn may_use_tiles() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let mut status = ARCH_PRCTL;
    // SAFETY: the call has no pointers; it overwrites rcx and r11. A kernel that does not know it returns an error.
    unsafe {
        asm!("syscall", inout("rax") status, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _, out("r11") _, options(nostack));
    }
    status == 0
}

/// The configuration of the tiles, as the processor loads it.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row of each tile.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Eight tiles of sixteen rows of 64 bytes.
    ///
    /// # Safety
    /// The processor has AMX.
    #[inline(always)]
    unsafe fn load() {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(64);
        rows[..8].fill(TILE as u8);
        let config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: the configuration is valid; the caller guarantees that the processor has the instruction.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
    }

    /// Frees the tiles.
    ///
    /// # Safety
    /// The processor has AMX, and no tile is in use.
    #[inline(always)]
    unsafe fn release() {
        // SAFETY: the caller meets this function's requirements.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// Elements of k that a product of tiles multiplies.
const STEP: usize = 32;

/// The micro-kernel of BF16 with columns of bf16. It needs AMX, and the instructions of [`super::avx512_bf16`].
pub(super) fn micro_kernel_of(dtype: DType) -> Option<MicroKernelFn> {
    (dtype == DType::BF16).then_some(micro_kernel)
}

/// Two panels by two groups of sixteen columns at a time, whose sums stay in tiles. Dot products multiply a rest of few columns, and the
/// elements behind the last whole step.
///
/// # Safety
/// The processor has AMX; otherwise as [`crate::cpu::simd::float_dot::micro_kernel`], with two panels.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512bf16")]
unsafe fn micro_kernel(panels: &[*const u8], columns: &[&[u8]], k: usize, mut out: TileOutput<'_>) {
    let dots = super::avx512_bf16::micro_kernel_of(DType::BF16);
    let (by_tiles, whole) = (columns_by_tiles(columns.len()), k / STEP * STEP);
    let (tiled, others) = columns.split_at(if whole == 0 { 0 } else { by_tiles });
    let [first, second] = [panels[0], panels[panels.len() - 1]];
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        if let Some(dots) = dots.filter(|_| !others.is_empty()) {
            dots(panels, others, k, out.offset(tiled.len(), 0));
        }
        if tiled.is_empty() {
            return;
        }
        TileConfig::load();
        for (g, columns) in tiled.chunks(2 * TILE).enumerate() {
            let mut sums = [[[[0f32; TILE]; TILE]; 2]; 2];
            multiply(first, second, columns, whole, &mut sums);
            for c in 0..columns.len() {
                for s in 0..panels.len() {
                    let sums = Avx512Ops::load_f32(sums[c / TILE][s][c % TILE].as_ptr());
                    out.store::<Avx512Ops>(2 * TILE * g + c, s, sums);
                }
            }
        }
        TileConfig::release();
        if let Some(dots) = dots.filter(|_| whole < k) {
            // Element pairs of sixteen rows lie side by side in a panel.
            let panels = [first, second].map(|panel| panel.add(2 * PANEL_ROWS * whole));
            for (c, column) in tiled.iter().enumerate() {
                let mut rest = out.offset(c, 0);
                rest.accumulate = true;
                dots(&panels[..2], &[&column[2 * whole..]], k - whole, rest);
            }
        }
    }
}

/// Columns of a product by tiles: all, or all but a rest of fewer than [`MIN_COLUMNS`].
fn columns_by_tiles(columns: usize) -> usize {
    let rest = columns % TILE;
    if rest < MIN_COLUMNS { columns - rest } else { columns }
}

/// Most elements of k for which columns are copied.
const COPIED: usize = 512;

/// Sums of up to two groups of sixteen columns and of two panels, over `k` elements, a multiple of [`STEP`]: of column c of group g and
/// row r of panel p in `[g][p][c][r]`.
///
/// # Safety
/// The processor has AMX, with all tiles of the largest size; the panels and the columns have as many elements.
unsafe fn multiply(
    first: *const u8,
    second: *const u8,
    columns: &[&[u8]],
    k: usize,
    sums: &mut [[[[f32; TILE]; TILE]; 2]; 2],
) {
    let distance = |c: usize| (columns[c + 1].as_ptr() as usize).wrapping_sub(columns[c].as_ptr() as usize);
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, options(nomem, nostack, preserves_flags));
        let groups = columns.len().div_ceil(TILE);
        if columns.len() == groups * TILE && (1..columns.len() - 1).all(|c| distance(c) == distance(0)) {
            add_products([first, second], columns[0].as_ptr(), distance(0), groups, k / STEP);
        } else {
            // Missing columns are zeros.
            let mut copy = [[0u8; 2 * COPIED]; 2 * TILE];
            for start in (0..k).step_by(COPIED) {
                let count = COPIED.min(k - start);
                for (to, column) in copy.iter_mut().zip(columns) {
                    to[..2 * count].copy_from_slice(&column[2 * start..2 * (start + count)]);
                }
                let panels = [first, second].map(|panel| panel.add(2 * PANEL_ROWS * start));
                add_products(panels, copy.as_ptr().cast(), 2 * COPIED, groups, count / STEP);
            }
        }
        asm!(
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            "tilestored [{sums} + {line} + 2048], tmm2",
            "tilestored [{sums} + {line} + 3072], tmm3",
            sums = in(reg) sums.as_mut_ptr(),
            line = in(reg) 64usize,
            options(nostack, preserves_flags)
        );
    }
}

/// Adds the products of `steps` steps of one group or two to tiles 0 to 3: of the first sixteen columns with both panels, then of the others.
/// No compiler uses tiles, so that they keep their values until they are stored.
///
/// # Safety
/// As [`multiply`]; the columns of the groups lie `stride` bytes apart.
#[inline(always)]
unsafe fn add_products(panels: [*const u8; 2], columns: *const u8, stride: usize, groups: usize, steps: usize) {
    macro_rules! loop_of {
        ($($of_second_group:literal)*) => {
            asm!(
                "2:",
                "tileloadd tmm4, [{low} + {stride}]",
                "tileloadd tmm6, [{first} + {line}]",
                "tileloadd tmm7, [{second} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                $($of_second_group,)*
                "add {low}, 64",
                "add {high}, 64",
                "add {first}, 1024",
                "add {second}, 1024",
                "dec {steps}",
                "jnz 2b",
                low = inout(reg) columns => _,
                high = inout(reg) columns.wrapping_add(TILE * stride) => _,
                first = inout(reg) panels[0] => _,
                second = inout(reg) panels[1] => _,
                steps = inout(reg) steps => _,
                stride = in(reg) stride,
                line = in(reg) 64usize,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly)
            )
        };
    }
    // SAFETY: the caller meets this function's requirements.
    unsafe {
        if groups == 2 {
            loop_of!("tileloadd tmm5, [{high} + {stride}]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7");
        } else {
            loop_of!();
        }
    }
}
