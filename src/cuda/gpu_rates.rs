//! Peak arithmetic rates of NVIDIA's architectures, for rooflines. scripts/roofline_model.py reads the table from this text.
//!
//! Rates are dense multiply-adds per clock and multiprocessor; sparsity doubles the numbers of data sheets. Sources, by compute
//! capability: 7.5 the Turing whitepaper (TU102); 8.0 the A100 whitepaper; 8.6 the GA102 whitepaper; 8.7 the technical brief of
//! Jetson AGX Orin, which has int8 only, and the A100's ratios of f16 and tf32 to int8; 8.9 the Ada whitepaper; 9.0 the H100
//! whitepaper; 10.0 the data sheet of B200; 12.0 the RTX Blackwell whitepaper. FP32 lanes: the CUDA programming guide, table of
//! arithmetic throughput. The test recomputes the published numbers of products from the rates.

/// Rates of one architecture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// Compute capability times ten: 80 is 8.0.
    pub capability: u32,
    /// f32 lanes: multiply-adds without tensor cores.
    pub f32: u32,
    /// f16 or bf16 products with f32 sums on tensor cores.
    pub f16: u32,
    /// tf32 products with f32 sums on tensor cores, if the architecture has them.
    pub tf32: Option<u32>,
    /// int8 products with 32-bit sums on tensor cores.
    pub int8: u32,
    /// Whether GeForce boards of this architecture execute tensor products with f32 sums at half the rate.
    halved_on_geforce: bool,
}

const fn row(capability: u32, f32: u32, [f16, tf32, int8]: [u32; 3], halved_on_geforce: bool) -> GpuRates {
    let tf32 = if tf32 == 0 { None } else { Some(tf32) };
    GpuRates { capability, f32, f16, tf32, int8, halved_on_geforce }
}

/// Capability, f32 lanes, [f16, tf32, int8] on tensor cores, half rate with f32 sums on GeForce.
const RATES: [GpuRates; 8] = [
    row(75, 64, [512, 0, 1024], true),
    row(80, 64, [1024, 512, 2048], false),
    row(86, 128, [512, 256, 1024], true),
    row(87, 128, [1024, 512, 2048], false),
    row(89, 128, [512, 256, 1024], true),
    row(90, 128, [2048, 1024, 4096], false),
    row(100, 128, [4096, 2048, 8192], false),
    row(120, 128, [512, 256, 1024], true),
];

/// The rates of a GPU by its compute capability times ten and the name of its model. None for an architecture that the table
/// lacks: a guess from a neighbour would be wrong by up to eight times (12.0 has the rates of 8.9, not of 10.0).
pub fn gpu_rates(capability: u32, name: &str) -> Option<GpuRates> {
    let rates = RATES.into_iter().find(|rates| rates.capability == capability)?;
    if rates.halved_on_geforce && name.contains("GeForce") {
        return Some(GpuRates { f16: rates.f16 / 2, tf32: rates.tf32.map(|rate| rate / 2), ..rates });
    }
    Some(rates)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products with published peaks: name, capability, multiprocessors, clock of the peaks in MHz, and the peaks of f16, tf32
    /// and int8 in tera-operations per second (two per multiply-add, dense, f32 sums); 0 where none is published.
    const PRODUCTS: [(&str, u32, u32, f64, [f64; 3]); 11] = [
        ("Quadro RTX 8000", 75, 72, 1770.0, [130.5, 0.0, 261.0]),
        ("NVIDIA GeForce RTX 2080 Ti", 75, 68, 1635.0, [56.9, 0.0, 227.7]),
        ("NVIDIA A100-SXM4-80GB", 80, 108, 1410.0, [312.0, 156.0, 624.0]),
        ("NVIDIA GeForce RTX 3090", 86, 82, 1695.0, [71.0, 35.6, 284.0]),
        ("NVIDIA A40", 86, 84, 1740.0, [149.7, 74.8, 299.3]),
        ("Orin", 87, 16, 1300.0, [0.0, 0.0, 85.0]),
        ("NVIDIA GeForce RTX 4090", 89, 128, 2520.0, [165.2, 82.6, 660.6]),
        ("NVIDIA L40S", 89, 142, 2520.0, [362.0, 183.0, 733.0]),
        ("NVIDIA H100 80GB HBM3", 90, 132, 1830.0, [989.4, 494.7, 1978.9]),
        ("NVIDIA B200", 100, 148, 1850.0, [2250.0, 1125.0, 4500.0]),
        ("NVIDIA GeForce RTX 5090", 120, 170, 2407.0, [209.5, 104.8, 838.0]),
    ];

    #[test]
    fn rates_give_the_published_peaks() {
        for (name, capability, multiprocessors, mhz, published) in PRODUCTS {
            let rates = gpu_rates(capability, name).expect("a row for each capability");
            let ours = [Some(rates.f16), rates.tf32, Some(rates.int8)];
            for ((rate, peak), what) in ours.into_iter().zip(published).zip(["f16", "tf32", "int8"]) {
                let tera = f64::from(rate.unwrap_or(0)) * 2.0 * f64::from(multiprocessors) * mhz / 1e6;
                assert!(
                    peak == 0.0 || (tera / peak - 1.0).abs() < 0.02,
                    "{name}: {what} is {tera}, published is {peak}"
                );
            }
        }
    }

    /// Products with published f32 peaks without tensor cores, as above; the clock can differ from that of the tensor cores.
    #[test]
    fn lanes_give_the_published_f32_peaks() {
        for (name, capability, multiprocessors, mhz, peak) in [
            ("Quadro RTX 8000", 75, 72, 1770.0, 16.3),
            ("NVIDIA A100-SXM4-80GB", 80, 108, 1410.0, 19.5),
            ("NVIDIA A40", 86, 84, 1740.0, 37.4),
            ("Orin", 87, 16, 1300.0, 5.3),
            ("NVIDIA L40S", 89, 142, 2520.0, 91.6),
            ("NVIDIA H100 80GB HBM3", 90, 132, 1980.0, 66.9),
            ("NVIDIA B200", 100, 148, 1965.0, 75.0),
            ("NVIDIA GeForce RTX 5090", 120, 170, 2407.0, 104.8),
        ] {
            let rates = gpu_rates(capability, name).expect("a row for each capability");
            let tera = f64::from(rates.f32) * 2.0 * f64::from(multiprocessors) * mhz / 1e6;
            assert!((tera / peak - 1.0).abs() < 0.02, "{name}: {tera}, published is {peak}");
        }
    }

    #[test]
    fn unknown_architectures_have_no_rates() {
        for capability in [70, 81, 91, 103, 110, 121] {
            assert_eq!(gpu_rates(capability, "NVIDIA X"), None);
        }
    }
}
