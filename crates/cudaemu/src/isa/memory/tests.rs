//! Address conversions on known values. Loads and stores are tested in `tests/emulator/memory`, because they need an executor.

use super::address::family;
use crate::exec_context::window::{LOCAL, PARAM, SHARED};
use crate::isa::harness::Harness;

#[test]
fn every_address_row_gives_known_values() {
    let mut table = Harness::new(family());
    conversions(&mut table);
    advice_and_fences_change_nothing(&mut table);
    table.finish();
}

fn conversions(table: &mut Harness) {
    let (shared, local, param) = (SHARED as i128, LOCAL as i128, PARAM as i128);
    for (space, start) in [
        ("global", 0),
        ("const", 0),
        ("shared", shared),
        ("shared::cta", shared),
        ("shared::cluster", shared),
        ("local", local),
        ("param", param),
        ("param::entry", param),
    ] {
        let offsets = [0, 0x10, 0xffff_ffff];
        for offset in offsets {
            table.check(&format!("cvta.{space}.u64"), &[(&[offset], &[start + offset])]);
            table.check(&format!("cvta.to.{space}.u64"), &[(&[start + offset], &[offset])]);
        }
        for (address, of) in [
            (0, "global"),
            (0x7f12_3456_789a, "global"),
            (shared - 1, "global"),
            (shared, "shared"),
            (shared + 0xffff_ffff, "shared"),
            (shared + 0x1_0000_0000, "global"),
            (local, "local"),
            (local + 0xffff_ffff, "local"),
            (param + 8, "param"),
            (-1, "global"),
        ] {
            // `shared::cta` and `shared::cluster` are shared memory, `param::entry` is parameter memory.
            let holds = space.split("::").next() == Some(of);
            table.check(&format!("isspacep.{space}"), &[(&[address], &[i128::from(holds)])]);
        }
    }
    for name in ["u64", "shared::cluster.u32", "shared::cluster.u64"] {
        table.check(&format!("mapa.{name}"), &[(&[0x1234, 0], &[0x1234])]);
        table.check(&format!("getctarank.{name}"), &[(&[0x1234], &[0])]);
    }
}

fn advice_and_fences_change_nothing(table: &mut Harness) {
    let names: Vec<(String, usize)> = family().rows.iter().map(|row| (row.name.clone(), row.operands.len())).collect();
    for (name, operands) in names {
        // Operands: an address and an optional size.
        if let Some("prefetch" | "fence" | "membar") = name.split('.').next() {
            table.check(&name, &[(&[0x1000, 128][..operands], &[])]);
        }
    }
}
