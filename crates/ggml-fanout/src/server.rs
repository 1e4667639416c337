//! Servers: noticing that one is lost, connecting again in the background, and filling its memory again.
//!
//! A lost connection takes the memory of its devices with it. The host's buffers stay; once the server answers again, each gets
//! new memory: what the host uploaded and nothing has overwritten is loaded again ([`crate::uploads`]), and everything else is zeros
//! that count as lost ([`crate::validity`]).

use crate::buffer::BufferState;
use crate::device::Device;
use crate::guard::{caught, lock};
use crate::host_log::{LogLevel, log};
use crate::registry;
use crate::uploads::{ModelFiles, Upload, Uploads};
use fanout::device::{Device as FanoutDevice, DeviceError, LoadOutcome, Queue, Region, TensorDigest, UploadSource};
use fanout::registry::Options;
use fanout::tensor::ByteRuns;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Pauses between attempts to connect again: doubled from the first to the last.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Limit of times that memory is restored because the host uploads meanwhile.
const MAX_RESTORES: usize = 4;

/// A server, or a device of one, as a user named it.
pub(crate) struct Server {
    name: String,
    options: Options,
    models: Option<PathBuf>,
    /// The devices, in the server's order.
    devices: OnceLock<Vec<&'static Device>>,
    /// Whether a thread is connecting again.
    recovering: Mutex<bool>,
}

impl Server {
    pub(crate) fn new(name: &str, options: &Options, models: Option<PathBuf>) -> &'static Server {
        Box::leak(Box::new(Server {
            name: name.to_owned(),
            options: options.clone(),
            models,
            devices: OnceLock::new(),
            recovering: Mutex::new(false),
        }))
    }

    pub(crate) fn set_devices(&self, devices: Vec<&'static Device>) {
        _ = self.devices.set(devices);
    }

    fn devices(&self) -> &[&'static Device] {
        self.devices.get().map_or(&[], Vec::as_slice)
    }

    /// Whether an error is the loss of this server. A queue that waits for another server fails with the loss of that server.
    pub(crate) fn is_lost_by(&self, error: &DeviceError) -> bool {
        let is_own = |endpoint: &str| self.name.split('/').next() == Some(endpoint);
        matches!(error, DeviceError::ConnectionLost { endpoint, .. } if is_own(endpoint))
    }

    /// Connects again in the background: the connection was lost, or what its memory lacks cannot be mended otherwise.
    pub(crate) fn lost(&'static self, error: &DeviceError) {
        let mut recovering = lock(&self.recovering);
        if !*recovering {
            let thread = std::thread::Builder::new().name("fanout-recover".to_owned());
            if let Err(e) = thread.spawn(|| self.recover_guarded()) {
                drop(recovering);
                // The next failure tries again.
                return log(LogLevel::Error, &format!("{}: no thread to connect again: {e}", self.name));
            }
            *recovering = true;
        }
        self.devices().iter().for_each(|device| device.set_lost(error));
    }

    fn recover_guarded(&self) {
        if !caught(false, || {
            self.recover();
            true
        }) {
            *lock(&self.recovering) = false;
        }
    }

    /// Connects until the server answers, and fills its memory again.
    fn recover(&self) {
        let (mut pause, mut logged, mut restored) = (PAUSES.0, String::new(), 1);
        loop {
            match registry::open_devices(&self.name, &self.options).and_then(|opened| self.restore(opened)) {
                // The host has uploaded more meanwhile, which only another restoring would load.
                Ok(installed)
                    if restored < MAX_RESTORES && installed.iter().any(|(_, device)| device.is_outdated()) =>
                {
                    restored += 1;
                }
                Ok(installed) => {
                    // Under the lock, so that a loss from now on starts another thread.
                    let mut recovering = lock(&self.recovering);
                    installed.into_iter().for_each(|(device, restored)| device.install(restored));
                    *recovering = false;
                    drop(recovering);
                    log(LogLevel::Info, &format!("{} is back", self.name));
                    return;
                }
                Err(reason) => {
                    if logged != reason {
                        log(LogLevel::Info, &format!("{} is not back yet: {reason}", self.name));
                        logged = reason;
                    }
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
        }
    }

    /// Memory of the new connection for all buffers.
    fn restore(&self, opened: Vec<Arc<dyn FanoutDevice>>) -> Result<Vec<(&'static Device, Restored)>, String> {
        let devices = self.devices();
        let same = opened.len() == devices.len()
            && opened.iter().zip(devices).all(|(new, device)| device.can_become(new.info()));
        if !same {
            return Err("it offers other devices now".to_owned());
        }
        let mut files = ModelFiles::new(self.models.clone());
        let restored = opened.into_iter().zip(devices).map(|(fanout, &device)| {
            let buffers = device.live_buffers().into_iter().map(|buffer| {
                let restored =
                    Server::restore_buffer(&*fanout, device, &buffer, &mut files).map_err(|e| e.to_string())?;
                Ok((buffer, restored))
            });
            let buffers = buffers.collect::<Result<Vec<_>, String>>()?;
            Ok((device, Restored { fanout, buffers }))
        });
        restored.collect()
    }

    fn restore_buffer(
        fanout: &dyn FanoutDevice,
        device: &Device,
        buffer: &BufferState,
        files: &mut ModelFiles,
    ) -> Result<RestoredBuffer, DeviceError> {
        let memory = fanout.alloc(buffer.bytes(), &device.budget)?.whole();
        let mut queue = fanout.queue(&device.budget)?;
        let (uploads, mut missing, mut filled) = (buffer.uploads(), None, Vec::new());
        for (&position, upload) in &uploads {
            let region = memory.subregion(position, upload.bytes)?;
            if !load_from_disk(&mut *queue, &region, upload)? {
                match upload.read(files) {
                    Ok(bytes) => queue.upload(region, upload.whole.as_ref(), UploadSource::Borrowed(&bytes))?,
                    // What is no weight stays lost: the host may never need it again.
                    Err(_) if !buffer.holds_weights() => continue,
                    Err(reason) => _ = missing.get_or_insert(reason),
                }
            }
            filled.push((position..position + upload.bytes, upload.digest));
        }
        queue.mark().wait(None)?;
        Ok(RestoredBuffer { memory, uploads, filled, missing })
    }
}

/// Loads from the disk of a device's server, which are given up if the first ones fail.
#[derive(Debug, Default)]
pub(crate) struct DiskLoads {
    misses: AtomicU32,
}

/// Weights in a row that a server may lack before no more are requested.
const MAX_MISSES: u32 = 3;

impl DiskLoads {
    /// Loads a weight, if the server has it.
    pub(crate) fn has(&self, queue: &mut dyn Queue, region: &Region, upload: &Upload) -> Result<bool, DeviceError> {
        if upload.whole.is_none() || self.misses.load(Ordering::Relaxed) >= MAX_MISSES {
            return Ok(false);
        }
        let found = load_from_disk(queue, region, upload)?;
        if found {
            self.misses.store(0, Ordering::Relaxed)
        } else {
            _ = self.misses.fetch_add(1, Ordering::Relaxed)
        }
        Ok(found)
    }
}

/// Loads a weight from the server's disk, if it is there.
fn load_from_disk(queue: &mut dyn Queue, region: &Region, upload: &Upload) -> Result<bool, DeviceError> {
    let (Some(desc), Some(loader)) = (&upload.whole, queue.load_by_digest()) else { return Ok(false) };
    let wanted = TensorDigest { digest: upload.digest, bytes: upload.bytes, name: &upload.name };
    let outcome = loader.load_by_digest(region.clone(), Some(desc), wanted, ByteRuns::whole(upload.bytes))?;
    Ok(outcome.wait(None)? == LoadOutcome::Found)
}

/// A device after its server came back.
pub(crate) struct Restored {
    pub(crate) fanout: Arc<dyn FanoutDevice>,
    pub(crate) buffers: Vec<(Arc<BufferState>, RestoredBuffer)>,
}

impl Restored {
    /// Whether the host has uploaded since the memory was restored.
    fn is_outdated(&self) -> bool {
        let digests =
            |uploads: &Uploads| uploads.iter().map(|(&start, upload)| (start, upload.digest)).collect::<Vec<_>>();
        self.buffers.iter().any(|(buffer, restored)| digests(&buffer.uploads()) != digests(&restored.uploads))
    }
}

pub(crate) struct RestoredBuffer {
    pub(crate) memory: Region,
    /// The uploads that were to be loaded.
    uploads: Uploads,
    /// The ranges of memory that were loaded, in order, with the digests of their bytes.
    pub(crate) filled: Vec<(Range<u64>, [u8; 32])>,
    /// Why a weight could not be loaded again.
    pub(crate) missing: Option<String>,
}
