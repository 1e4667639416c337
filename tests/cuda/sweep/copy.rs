use super::Sweep;

pub fn run(_sweep: &Sweep) {}
