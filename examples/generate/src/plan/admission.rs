//! Chooses a placement that a run admits: the planner's estimate of memory is compared with the engine's admission check, on the devices
//! that were measured.

use super::table::placement_text;
use super::{chosen_args, device_order};
use crate::args::{Args, WeightStorage};
use crate::engine::{self, EngineError};
use crate::hparams::HParams;
use crate::load;
use crate::placed_model::PlacedModel;
use crate::sample::Sampler;
use anyhow::Context;
use fanout::device::Device;
use fanout::gguf::Gguf;
use fanout::sched::SchedError;
use fanout::sched::planner::{
    Admission, Candidate, Choice, Machine, ModelSizes, PlannerError, Workload, choose_admitted,
};
use fanout::weights::{ModelFile, Weights};
use std::sync::Arc;

/// A model and the open devices for which a placement is chosen.
pub(super) struct PlanInputs<'a> {
    pub(super) args: &'a Args,
    pub(super) file: &'a ModelFile,
    pub(super) gguf: &'a Gguf<'a>,
    pub(super) hparams: &'a HParams,
    /// Tokens of the longest prompt; 0 if it is not known.
    pub(super) prompt: usize,
    pub(super) devices: &'a [Arc<dyn Device>],
}

/// A placement that the admission check has admitted.
pub(super) struct AdmittedPlacement {
    pub(super) choice: Choice,
    /// The options of a run with the placement.
    pub(super) args: Args,
    /// Whether `--rpc`, `--device`, `--mem` and `--threads` are as given.
    pub(super) kept: bool,
    /// Remarks that the choice does not show.
    pub(super) notes: Vec<String>,
}

impl PlanInputs<'_> {
    /// Chooses the best placement that fits. If none does, weights of CPU devices stay in the mapped file, as in a run without
    /// `--auto`, unless `--weights packed` is given.
    ///
    /// # Errors
    /// No placement fits, or the admission check refuses all that were tried.
    pub(super) fn choose(
        &self,
        machine: &Machine,
        sizes: &ModelSizes,
        workload: &Workload,
    ) -> anyhow::Result<AdmittedPlacement> {
        let can_map = |&device: &usize| self.devices[device].import_host().is_some();
        let mapping: Vec<usize> = (0..self.devices.len()).filter(can_map).collect();
        let choose_mapped = |args: &Args| {
            let machine = machine.clone().with_mapped_weights(&mapping);
            self.choose_with(args, &machine, sizes, workload)
        };
        if self.args.weights == Some(WeightStorage::Mapped) {
            return choose_mapped(self.args);
        }
        match self.choose_with(self.args, machine, sizes, workload) {
            Err(error) if self.args.weights.is_none() && !mapping.is_empty() && is_too_large(&error) => {
                let args = Args { weights: Some(WeightStorage::Mapped), ..self.args.clone() };
                let mut placement =
                    choose_mapped(&args).context("also with the weights of CPU devices in the mapped file")?;
                placement.notes.push(
                    "the model does not fit into memory, so weights of CPU devices stay in the mapped file: the predicted rates hold \
                     while the system keeps the file in memory; else each token waits for the disk"
                        .to_owned(),
                );
                Ok(placement)
            }
            chosen => chosen,
        }
    }

    fn choose_with(
        &self,
        args: &Args,
        machine: &Machine,
        sizes: &ModelSizes,
        workload: &Workload,
    ) -> anyhow::Result<AdmittedPlacement> {
        let mut refusals = Vec::new();
        let choice = choose_admitted(machine, sizes, workload, &mut |candidate| {
            let Err(error) = self.check(args, candidate) else { return Admission::Admitted };
            refusals.push(format!("{}: {error}", placement_text(machine, &candidate.stages)));
            admission(&error, candidate, self.devices.len())
        });
        let refused = |first: &String| {
            format!("number of placements that the admission check refused: {}; the first: {first}", refusals.len())
        };
        let note = refusals.first().map(refused);
        let choice = match (choice, &note) {
            (Err(error), Some(note)) => Err(anyhow::Error::from(error).context(note.clone()))?,
            (choice, _) => choice?,
        };
        let (args, kept) = self.run_args(args, &choice.best);
        Ok(AdmittedPlacement { choice, args, kept, notes: note.into_iter().collect() })
    }

    /// The options of a run with a placement, and whether the user's `--rpc`, `--device`, `--mem` and `--threads` stay as they are.
    fn run_args(&self, args: &Args, candidate: &Candidate) -> (Args, bool) {
        let (mut args, kept) = chosen_args(args, self.devices, &candidate.stages);
        if args.prompts.is_some() {
            args.sequence_groups = u16::try_from(candidate.prediction.groups).ok();
        }
        (args, kept)
    }

    /// Places a candidate as a run does, and checks it as a run does before it loads anything.
    fn check(&self, args: &Args, candidate: &Candidate) -> anyhow::Result<()> {
        let (args, _) = self.run_args(args, candidate);
        let order = device_order(&candidate.stages);
        let devices: Vec<_> = order.into_iter().map(|device| Arc::clone(&self.devices[device])).collect();
        let sampling = Sampler::from_args(&args, 0).sampling()?;
        let placed = PlacedModel::new(&args, &devices, self.gguf, self.hparams, self.prompt, sampling)?;
        let PlacedModel { placement, mut model, split, options, .. } = placed;
        if args.weights == Some(WeightStorage::Mapped) {
            let weights = Weights::of_file(self.file, &self.gguf.tensors);
            for (number, device) in devices.iter().enumerate() {
                load::map_weights(&mut model, &weights, (&placement, &split), (number, &**device))?;
            }
        }
        Ok(engine::check_memory((&model, &split), &devices, options)?)
    }
}

/// How the planner goes on after the check of a candidate failed, on a machine with this number of devices.
fn admission(error: &anyhow::Error, candidate: &Candidate, devices: usize) -> Admission {
    let Some(EngineError::Sched(SchedError::NotEnoughMemory { needs })) = error.downcast_ref() else {
        return Admission::Refused;
    };
    let mut missing = vec![0; devices];
    for (device, needs) in device_order(&candidate.stages).into_iter().zip(needs) {
        missing[device] = needs.stored.saturating_add(needs.computed).saturating_sub(needs.free);
    }
    Admission::LacksMemory(missing)
}

/// Whether no placement fits, so that weights in the mapped file, which take no memory, may help.
fn is_too_large(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(PlannerError::NothingFits { .. } | PlannerError::NothingAdmitted { .. }))
}

#[cfg(test)]
mod tests {
    use super::super::{sizes::model_sizes, undecided};
    use super::*;
    use crate::hparams::Arch;
    use crate::model::CacheOptions;
    use crate::model::tests::toy::ToyModel;
    use clap::Parser;
    use fanout::cpu::{CpuDevice, MathMode};
    use fanout::device::DeviceKind;
    use fanout::device::noop::NoopDevice;
    use fanout::sched::planner::{DeviceSpeed, Host, Link};

    /// The file of a tiny model, mapped; its name is removed again.
    fn toy_file(name: &str) -> ModelFile {
        let path = std::env::temp_dir().join(format!("fanout-{name}-{}.gguf", std::process::id()));
        std::fs::write(&path, ToyModel::new(Arch::Llama).gguf_bytes()).unwrap();
        let file = ModelFile::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    fn args(weights: Option<WeightStorage>) -> Args {
        let args = Args::try_parse_from(["generate", "m.gguf", "--tokens", "1,4", "-n", "1", "-u", "1", "--auto"]);
        Args { weights, ..args.unwrap() }
    }

    /// Devices of this process, each slower than the one before it.
    fn machine(devices: &[Arc<dyn Device>]) -> Machine {
        let speed = |(number, device): (usize, &Arc<dyn Device>)| DeviceSpeed {
            name: device.info().name.clone(),
            host: Host::Client,
            read_rate: 1e9 / (number + 1) as f64,
            few_columns_rate: 1e12,
            many_columns_rate: 1e12,
            kv_read_rate: 1e9,
            node_time: 0.0,
            run_time: 0.0,
            cores: None,
            together: 1.0,
            free: device.memory().unwrap().free,
            collectives: false,
        };
        let speeds = devices.iter().enumerate().map(speed).collect();
        Machine::new(speeds, Vec::new(), Vec::new(), Link { round_trip: 0.1, bandwidth: 1e9 }).unwrap()
    }

    fn sizes(args: &Args, gguf: &Gguf<'_>, hparams: &HParams) -> ModelSizes {
        let cache = CacheOptions { groups: 1, cells: 256, dtype: args.kv_type.dtype(), flash_attn: false };
        model_sizes(gguf, hparams, &cache, args).unwrap().0
    }

    fn workload() -> Workload {
        Workload { prompt_tokens: 2, decode_tokens: 1, context: 256, micro_batch: 1, ..Workload::default() }
    }

    /// The faster device pads each tensor, which the estimate does not know.
    #[test]
    fn the_next_placement_follows_if_the_check_refuses_the_best() {
        let file = toy_file("refused-plan");
        let gguf = file.parse_gguf().unwrap();
        let hparams = HParams::read(&gguf.metadata).unwrap();
        let args = args(None);
        let padded = NoopDevice::new("padded", DeviceKind::Gpu).with_memory(1 << 30).with_padding(1 << 30);
        let devices = [padded.shared(), NoopDevice::new("plain", DeviceKind::Gpu).shared()];
        let choose = |devices: &[Arc<dyn Device>]| {
            let inputs = PlanInputs { args: &args, file: &file, gguf: &gguf, hparams: &hparams, prompt: 2, devices };
            inputs.choose(&machine(devices), &sizes(&args, &gguf, &hparams), &workload())
        };
        let placement = choose(&devices).unwrap();
        assert_eq!(device_order(&placement.choice.best.stages), [1]);
        assert_eq!((placement.args.device.as_deref(), placement.kept), (Some("plain"), false));
        let [note] = &placement.notes[..] else { panic!("{:?}", placement.notes) };
        assert!(note.contains("refused: 1; the first: padded: not enough memory: padded needs"), "{note}");
        // A faster one that is not chosen is explained.
        let mut choice = placement.choice;
        assert_eq!(undecided(&choice), None);
        let mut faster = choice.best.clone();
        faster.prediction.decode_rate *= 1.02;
        choice.runners_up.push(faster);
        assert!(undecided(&choice).is_some_and(|note| note.contains("less than 3 %")));
        choice.runners_up[0].prediction.decode_rate *= 1.1;
        assert!(undecided(&choice).is_some_and(|note| note.contains("no difference measured")));
        // Nothing is left: the error has the first refusal and a next step.
        let error = choose(&devices[..1]).err().unwrap();
        let text = format!("{error:#}");
        assert!(is_too_large(&error) && text.contains("padded needs") && text.contains("add devices"), "{text}");
    }

    /// A device that lacks one byte for a copy of the weights.
    #[test]
    fn weights_stay_in_the_mapped_file_if_nothing_else_fits() {
        let file = toy_file("mapped-plan");
        let gguf = file.parse_gguf().unwrap();
        let hparams = HParams::read(&gguf.metadata).unwrap();
        let sizes = sizes(&args(None), &gguf, &hparams);
        let cpu = |bytes| [CpuDevice::new("CPU0", 1, MathMode::Exact, bytes).unwrap() as Arc<dyn Device>];
        let choose = |bytes: u64, weights| {
            let (args, devices) = (args(weights), cpu(bytes));
            let inputs =
                PlanInputs { args: &args, file: &file, gguf: &gguf, hparams: &hparams, prompt: 2, devices: &devices };
            inputs.choose(&machine(&devices), &sizes, &workload())
        };
        let packed = choose(1 << 28, None).unwrap();
        assert_eq!((packed.args.weights, packed.notes.len()), (None, 0));
        // Enough for each tensor alone, which no buffer can exceed.
        let small = 1 << 16;
        let (args, devices) = (args(None), cpu(small));
        let inputs =
            PlanInputs { args: &args, file: &file, gguf: &gguf, hparams: &hparams, prompt: 2, devices: &devices };
        let refusal = inputs.check(&args, &packed.choice.best).unwrap_err();
        let Admission::LacksMemory(missing) = admission(&refusal, &packed.choice.best, 1) else { panic!("{refusal}") };
        let needed = missing[0] + small;

        let mapped = choose(needed - 1, None).unwrap();
        assert_eq!(mapped.args.weights, Some(WeightStorage::Mapped));
        assert!(mapped.notes.iter().any(|note| note.contains("mapped file")), "{:?}", mapped.notes);
        assert_eq!(choose(needed - 1, Some(WeightStorage::Mapped)).unwrap().args.weights, Some(WeightStorage::Mapped));
        for (bytes, weights) in [(needed - 1, Some(WeightStorage::Packed)), (1 << 13, None)] {
            let error = choose(bytes, weights).err().unwrap();
            assert!(is_too_large(&error) && format!("{error:#}").contains("add devices"), "{error:#}");
        }
    }
}
