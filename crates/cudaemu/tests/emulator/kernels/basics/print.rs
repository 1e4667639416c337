//! printf, and assertions that hold. Uses a device without the driver, because the driver prints to the process's stdout.

use std::sync::mpsc::{Receiver, channel};

use crate::bare_device::{Device, Params};
use crate::gpu::ptx;

/// A device, and the output of its kernels.
fn device() -> (Device, Receiver<String>) {
    let (sender, receiver) = channel();
    (Device::with_print(move |text| sender.send(text.to_owned()).unwrap()), receiver)
}

fn printed(receiver: &Receiver<String>) -> String {
    receiver.try_iter().collect()
}

#[test]
fn printf_formats_like_the_host() {
    let (mut device, lines) = device();
    let module = device.load(&ptx("print.sm_80"));
    let returned = device.upload(&[0; 4]);
    device.run(&module, "print_formats", 1, 32, Params::default().pointer(returned));
    let want = "plain text, a percent sign %\n\
        -42|   42|42   |00042|+42| 42\n\
        -1 4000000000 10 beef BEEF 0xff 010\n\
        -3 -4 -5 -6 7 18446744073709551615 4\n\
        1.500000|     3.142|2.50      |1.234568e+04|1.20E-04|1e-05|1E+20\n\
        0x1p+0 inf -inf -0.000000\n\
        ok string|     right|left  |cu\n     7|1.23\n0x1234\n";
    assert_eq!(printed(&lines), want);
    // printf returns the number of its arguments.
    assert_eq!(device.download(returned, 4), 42u32.to_le_bytes());
}

#[test]
fn every_thread_prints_its_line() {
    let (mut device, lines) = device();
    let module = device.load(&ptx("print.sm_80"));
    device.run(&module, "print_threads", 3, 40, Params::default());
    let text = printed(&lines);
    let mut lines: Vec<&str> = text.lines().collect();
    let mut want: Vec<String> = (0..120).map(|i| format!("block {} thread {}", i / 40, i % 40)).collect();
    lines.sort_unstable();
    want.sort_unstable();
    assert_eq!(lines, want);
}

#[test]
fn printf_takes_many_arguments() {
    let (mut device, lines) = device();
    let module = device.load(&ptx("print.sm_80"));
    let values = [0.5, -1.25, 1e10, 3.0, 1e-7, 0.1, 123456.0, 1234567.0f64];
    let memory = device.upload(&values.map(f64::to_le_bytes).concat());
    device.run(&module, "print_many", 2, 32, Params::default().pointer(memory));
    assert_eq!(printed(&lines), "0.5 -1.25 1e+10 3 1e-07 0.1 123456 1.23457e+06 8\n".repeat(2));
}

#[test]
fn assertions_that_hold_print_nothing() {
    let (mut device, lines) = device();
    let module = device.load(&ptx("print.sm_80"));
    let memory = device.upload(&(0..96i32).flat_map(i32::to_le_bytes).collect::<Vec<_>>());
    device.run(&module, "assert_below", 2, 48, Params::default().pointer(memory).add(&96i32.to_le_bytes()));
    assert_eq!(printed(&lines), "");
}
