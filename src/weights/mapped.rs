//! Weights that stay in the mapped file: a device reads them from the page cache.

use super::{Weight, Weights, WeightsError};
use crate::device::{Buffer, Device, Region};
use crate::tensor::ByteRuns;

/// Read-only buffers of a device over the pages of the mapped files of a model. Made by [`Weights::map`].
#[derive(Debug)]
pub struct MappedWeights {
    /// By file of the model.
    buffers: Vec<Buffer>,
}

impl Weights<'_> {
    /// Gives a device the pages of the mapped files as its memory, read-only, without reading them: see
    /// [`ImportHost::import_read_only`](crate::device::ImportHost::import_read_only). `None` for a device that cannot use the host's
    /// memory, and for weights that are not in mapped files.
    ///
    /// # Errors
    /// [`WeightsError::File`] if a file cannot be mapped again; [`WeightsError::Device`] if the device refuses it.
    pub fn map(&self, device: &dyn Device) -> Result<Option<MappedWeights>, WeightsError> {
        let Some(import) = device.import_host().filter(|_| !self.files.is_empty()) else { return Ok(None) };
        let is_part = self.files.len() > 1;
        let buffers = self.files.iter().map(|file| {
            let unmapped = |error| WeightsError::File { path: file.path().to_owned(), is_part, error };
            let pages = file.map_read_only(0..file.len()).map_err(unmapped)?;
            import.import_read_only(pages).map_err(|error| WeightsError::on(device, error))
        });
        Ok(Some(MappedWeights { buffers: buffers.collect::<Result<_, _>>()? }))
    }
}

impl MappedWeights {
    /// The part `runs` of a weight of the [`Weights`] that made this. `None` for a part that is not consecutive bytes of the file, or
    /// not aligned to the elements of its type there: it must be loaded ([`load()`](super::load())).
    pub fn region(&self, weight: &Weight<'_>, runs: ByteRuns) -> Option<Region> {
        let offset = weight.offset + runs.offset();
        let in_place = runs.count() == 1 && runs.end() <= weight.bytes.len() as u64;
        let aligned = offset.is_multiple_of(weight.desc.dtype().alignment() as u64);
        self.buffers.get(weight.part).filter(|_| in_place && aligned)?.region(offset, runs.bytes()).ok()
    }
}
