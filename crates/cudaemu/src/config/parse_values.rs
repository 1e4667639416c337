//! Parsers for the values of settings: numbers, sizes, lists, PCI addresses.

use super::{FailingCall, InjectedFault, LaunchNumber, Pci, Peers, ReplacedLine};
use crate::error::Error;

pub(super) fn store_parsed<T>(place: &mut Option<T>, value: Result<T, String>) -> Result<(), String> {
    *place = Some(value?);
    Ok(())
}

pub(super) fn list<T>(text: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    text.split(',').map(|entry| read(entry.trim())).collect()
}

pub(super) fn number(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let number = text.parse::<u64>().map_err(|_| format!("{text:?} is no whole number"))?;
    match (least..=most).contains(&number) {
        true => Ok(number),
        false => Err(format!("{number} is not within {least} to {most}")),
    }
}

pub(super) fn positive_float(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(amount) if amount.is_finite() && amount > 0.0 => Ok(amount),
        _ => Err(format!("{text:?} is no positive number")),
    }
}

pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    // At most 64 TiB, the size of a device's range in the address space.
    number(digits, 1, (1 << 46) >> shift).map(|number| number << shift)
}

pub(super) fn choice<T: Copy>(text: &str, choices: &[(&str, T)]) -> Result<T, String> {
    let found = choices.iter().find(|(name, _)| *name == text);
    found.map(|&(_, value)| value).ok_or_else(|| format!("{text:?} is none of the choices"))
}

pub(super) fn pci(text: &str) -> Result<Pci, String> {
    Pci::parse(text).ok_or_else(|| format!("{text:?} is no PCI address"))
}

pub(super) fn peers(text: &str) -> Result<Peers, String> {
    match text {
        "all" => Ok(Peers::All),
        "none" | "" => Ok(Peers::Pairs(Vec::new())),
        text => pairs(text).map(Peers::Pairs),
    }
}

pub(super) fn pairs(text: &str) -> Result<Vec<(usize, usize)>, String> {
    list(text, |pair| {
        let (a, b) = pair.split_once('-').ok_or_else(|| format!("{pair:?} is no pair"))?;
        Ok((device(a)?, device(b)?))
    })
}

fn device(text: &str) -> Result<usize, String> {
    Ok(number(text, 0, 63)? as usize)
}

/// `NUMBER@DEVICE`; the device is 0 if omitted.
pub(super) fn launch_number(text: &str) -> Result<LaunchNumber, String> {
    let (launch, on) = text.split_once('@').unwrap_or((text, "0"));
    Ok(LaunchNumber { device: device(on)?, number: number(launch, 1, u64::MAX)? })
}

/// `NUMBER:KIND@DEVICE`; kind and device may be omitted.
pub(super) fn fault_at(text: &str) -> Result<InjectedFault, String> {
    let (launch, on) = text.split_once('@').unwrap_or((text, "0"));
    let (launch, kind) = launch.split_once(':').unwrap_or((launch, "address"));
    let error = choice(
        kind,
        &[
            ("address", Error::IllegalAddress),
            ("ecc", Error::EccUncorrectable),
            ("launch", Error::LaunchFailed),
            // What programs got from GPUs that had fallen off the bus (Xid 79).
            ("lost", Error::Unknown),
        ],
    )?;
    Ok(InjectedFault { at: LaunchNumber { device: device(on)?, number: number(launch, 1, u64::MAX)? }, error })
}

/// A list of `FUNCTION:NUMBER:CODE`, which may be empty; `*` stands for all functions.
pub fn failing_calls(text: &str) -> Result<Vec<FailingCall>, String> {
    let call = |entry: &str| match entry.split(':').collect::<Vec<_>>()[..] {
        [function, n, code] => Ok(FailingCall {
            function: (function != "*").then(|| function.to_owned()),
            number: number(n, 1, u64::MAX)?,
            code: number(code, 1, u32::MAX.into())? as u32,
        }),
        _ => Err(format!("{entry:?} is no FUNCTION:NUMBER:CODE")),
    };
    if text.is_empty() { Ok(Vec::new()) } else { list(text, call) }
}

pub(super) fn replaced_line(text: &str) -> Result<ReplacedLine, String> {
    let mut parts = text.splitn(3, ':');
    let (Some(entry), Some(line), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
        return Err(format!("{text:?} is no ENTRY:LINE:TEXT"));
    };
    Ok(ReplacedLine {
        entry: entry.to_owned(),
        line: number(line, 1, u32::MAX.into())? as usize,
        text: text.to_owned(),
    })
}

pub(super) fn driver_version(text: &str) -> Result<u32, String> {
    let version = match text.split_once('.') {
        Some((major, minor)) => number(major, 1, 99)? * 1000 + number(minor, 0, 99)? * 10,
        None => number(text, 1000, 99_990)?,
    };
    Ok(version as u32)
}
