//! Runs 64 sequences on one thread of tokio, over all devices of a list: two servers, or two CPUs of this machine.
//!
//! ```text
//! async-sequences HOST:PORT,HOST:PORT
//! async-sequences CPU,CPU
//! ```
//!
//! Each sequence is a task: it submits a run on its state, awaits the new state, and submits the next run on that. The thread never blocks: a
//! semaphore admits as many runs as the scheduler has in flight. The weights are in two layers, one on each device, so that the
//! devices work on runs of different sequences at the same time.

use fanout::device::{Device, MemoryBudget, UploadSource};
use fanout::graph::TensorId;
use fanout::ops::mul_mat::MulMat;
use fanout::registry::{self, Registry};
use fanout::sched::{Options, PreparedPlan, Scheduler, TaskBuilder};
use fanout::tensor::{DType, TensorDesc, bytes_of};
use std::cell::RefCell;
use std::error::Error;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::LocalSet;

const SEQUENCES: usize = 64;
const STEPS: usize = 20;

/// Elements of the state of a sequence.
const WIDTH: usize = 64;

/// Runs in flight.
const DEPTH: usize = 4;

/// Memory of each device in bytes.
const MEMORY: u64 = 64 << 20;

/// A model of one product for each device, which turns its input by one element.
struct Model {
    scheduler: Scheduler,
    plan: PreparedPlan,
    x: TensorId,
    y: TensorId,
}

impl Model {
    fn new(devices: Vec<Arc<dyn Device>>) -> Result<Model, Box<dyn Error>> {
        let budget = MemoryBudget::new(MEMORY);
        let mut task = TaskBuilder::new();
        let x = task.input("x", DType::F32, [WIDTH])?;
        let mut y = x;
        let turn: Vec<f32> = (0..WIDTH * WIDTH).map(|i| f32::from(i % WIDTH == (i / WIDTH + 1) % WIDTH)).collect();
        let desc = TensorDesc::contiguous(DType::F32, [WIDTH, WIDTH])?;
        for (number, device) in devices.iter().enumerate() {
            let region = device.alloc(device.alloc_size(&desc), &budget)?.region(0, desc.extent() as u64)?;
            let mut queue = device.queue(&budget)?;
            queue.upload(region.clone(), Some(&desc), UploadSource::from(&turn[..]))?;
            queue.mark().wait(None)?;
            let weight = task.stored(format!("W{number}"), desc, number, Some(region))?;
            y = task.node(MulMat::PLAIN, &[weight, y])?;
        }
        task.output(y)?;
        let mut scheduler = Scheduler::new(devices, Options::default().with_depth(DEPTH), &budget)?;
        let plan = scheduler.build(&Arc::new(task.build()?))?;
        Ok(Model { scheduler, plan, x, y })
    }
}

/// Runs a sequence. One element of its state is not 0; each product moves it.
async fn sequence(model: &RefCell<Model>, runs: &Semaphore, number: usize) -> Result<Vec<f32>, Box<dyn Error>> {
    let mut state = vec![0.0; WIDTH];
    state[0] = 1.0 + number as f32;
    for _ in 0..STEPS {
        let _admitted = runs.acquire().await?;
        let read = {
            let mut model = model.borrow_mut();
            let Model { scheduler, plan, x, y } = &mut *model;
            scheduler.submit(plan, &[(*x, bytes_of(&state))])?;
            scheduler.read(plan, *y)?
        };
        for (value, bytes) in state.iter_mut().zip(read.await?.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    }
    Ok(state)
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&std::env::args().nth(1).unwrap_or_else(|| "CPU,CPU".to_owned()))?;
    println!("{SEQUENCES} sequences of {STEPS} runs");
    Ok(())
}

/// Runs all sequences on the devices of a list.
fn run(list: &str) -> Result<(), Box<dyn Error>> {
    let servers = list.contains(':'); // their memory is limited by themselves
    let options = registry::Options::default().with_memory(if servers { Vec::new() } else { vec![MEMORY] });
    let devices = Registry::detect().open(list, &options)?;
    let turns = STEPS * devices.len() % WIDTH;
    let model = Rc::new(RefCell::new(Model::new(devices)?));
    let runs = Rc::new(Semaphore::new(DEPTH));
    let sequences = LocalSet::new();
    let tasks: Vec<_> = (0..SEQUENCES)
        .map(|number| {
            let (model, runs) = (Rc::clone(&model), Rc::clone(&runs));
            sequences.spawn_local(async move { sequence(&model, &runs, number).await })
        })
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(sequences.run_until(async {
        for (number, task) in tasks.into_iter().enumerate() {
            let state = task.await??;
            let found = state.iter().position(|&value| value != 0.0);
            if found != Some((WIDTH - turns) % WIDTH) || state.iter().sum::<f32>() != 1.0 + number as f32 {
                return Err(format!("sequence {number} ends with {state:?}").into());
            }
        }
        Ok(())
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;
    use fanout::cpu::{CpuDevice, MathMode};
    use fanout::rpc::server::{Config, Server};

    #[test]
    fn sequences_share_two_devices() {
        run("CPU,CPU").unwrap();
    }

    #[test]
    fn sequences_share_two_servers() {
        let start = |_| {
            let device = CpuDevice::new("CPU", 1, MathMode::Fast, MEMORY).unwrap();
            let server = Server::bind("127.0.0.1", 0, vec![device], Config::default()).unwrap();
            let (address, handle) = (server.local_addr().to_string(), server.handle());
            (address, handle, std::thread::spawn(move || server.run()))
        };
        let [first, second] = [0, 1].map(start);
        run(&format!("{},{}", first.0, second.0)).unwrap();
        for (_, handle, thread) in [first, second] {
            handle.shutdown();
            thread.join().unwrap();
        }
    }
}
