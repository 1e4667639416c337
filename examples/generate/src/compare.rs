//! Prints the comparison of the devices with a reference device: the NMSE (normalised mean square error) of each node.

use fanout::sched::ObservedNode;
use fanout::tensor::DType;
use fanout::tensor::quant::dequantiser;
use std::io::{self, Write};

/// NMSE above which a node is marked as suspicious. The rounding of activations in quantised products stays below this.
const SUSPICIOUS_NMSE: f64 = 1e-3;

/// Prints a line for each node, and in the end the node with the largest error.
pub struct Comparison<'a> {
    out: &'a mut dyn Write,
    devices: Vec<String>,
    nodes: usize,
    suspicious: usize,
    worst: Option<(f64, String)>,
}

impl<'a> Comparison<'a> {
    /// Prints to `out`. `devices` are the names of the devices, by index.
    pub fn new(out: &'a mut dyn Write, devices: Vec<String>) -> Comparison<'a> {
        Comparison { out, devices, nodes: 0, suspicious: 0, worst: None }
    }

    /// Compares a node's result on its device (`here`) with the result on the reference, and prints a line.
    ///
    /// # Errors
    /// A failed write to the output.
    pub fn node(&mut self, seen: ObservedNode<'_>, here: &[u8], reference: &[u8]) -> io::Result<()> {
        let device = self.devices.get(seen.device).map_or("", String::as_str);
        let error = node_error(seen.desc.dtype(), here, reference);
        let mark = if error > SUSPICIOUS_NMSE || error.is_nan() { "  <-" } else { "" };
        writeln!(
            self.out,
            "{:5}  {device:8} {:16} {:28} {error:9.2e}{mark}",
            seen.node,
            seen.op.to_string(),
            seen.name
        )?;
        self.nodes += 1;
        self.suspicious += usize::from(!mark.is_empty());
        // A NaN ranks above every number.
        let rank = |error: f64| if error.is_nan() { f64::INFINITY } else { error };
        if self.worst.as_ref().is_none_or(|(worst, _)| rank(error) > rank(*worst)) {
            self.worst = Some((error, seen.name.to_owned()));
        }
        Ok(())
    }

    /// Prints the summary.
    ///
    /// # Errors
    /// As [`Comparison::node`].
    pub fn finish(self) -> io::Result<()> {
        let Comparison { out, nodes, suspicious, worst, .. } = self;
        if let Some((error, name)) = worst {
            writeln!(out, "{nodes} nodes; the largest normalised mean square error is {error:.2e}, of {name:?}")?;
        }
        writeln!(out, "{suspicious} nodes differ by more than {SUSPICIOUS_NMSE:e}")
    }
}

/// The normalised mean square error of values; for integer types, the fraction of elements that differ.
fn node_error(dtype: DType, here: &[u8], reference: &[u8]) -> f64 {
    if here == reference {
        return 0.0;
    }
    let (Some(a), Some(b)) = (values(dtype, here), values(dtype, reference)) else {
        let width = dtype.block_bytes();
        let (a, b) = (here.chunks(width), reference.chunks(width));
        let count = a.len().max(1) as f64;
        return a.zip(b).filter(|(a, b)| a != b).count() as f64 / count;
    };
    let (mut square, mut all) = (0.0, 0.0);
    for (a, b) in a.iter().zip(&b) {
        // Equal infinities count as equal: masks contain them.
        if a.to_bits() != b.to_bits() {
            square += (f64::from(*a) - f64::from(*b)).powi(2);
        }
        if b.is_finite() {
            all += f64::from(*b).powi(2);
        }
    }
    if square == 0.0 { 0.0 } else { square / all }
}

fn values(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    let convert = dequantiser(dtype)?;
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    convert(bytes, &mut values);
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_normalised_by_the_reference() {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let nmse = |a: &[f32], b: &[f32]| node_error(DType::F32, &bytes(a), &bytes(b));
        assert_eq!(nmse(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert_eq!(nmse(&[1.0, 3.0], &[0.0, 2.0]), 0.5);
        assert_eq!(nmse(&[f32::INFINITY, 3.0], &[f32::INFINITY, 2.0]), 0.25);
        assert!(nmse(&[f32::NAN], &[1.0]).is_nan());
        assert_eq!(nmse(&[1.0], &[0.0]), f64::INFINITY);
        assert_eq!(nmse(&[-0.0], &[0.0]), 0.0);
        let ids = |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(node_error(DType::I32, &ids(&[1, 2, 3, 4]), &ids(&[1, 2, 4, 3])), 0.5);
    }
}
