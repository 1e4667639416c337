//! JIT options and module images: what `cuModuleLoad*` and `cuLibraryLoad*` receive.

use std::ffi::c_uint;

use super::ffi_guard::{Buffer, In, InOut, Text};
use crate::console::log_stderr;
use crate::driver::module::{LoadError, ModuleImage};
use crate::error::{Error, Result};

/// The load options that have an effect: where the error log goes. The others tune a code generator, which the emulator lacks.
pub(super) struct Options {
    /// Buffer of the error log, its size in bytes, and the index of the option whose value receives the length.
    log: Option<(Buffer, usize)>,
    length: Option<usize>,
    values: Option<InOut<u64>>,
}

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`; `INFO` is the same pair for the information log.
const LOG: [u32; 2] = [5, 6];
const INFO: [u32; 2] = [3, 4];

impl Options {
    /// No options.
    pub(super) fn none() -> Self {
        Self { log: None, length: None, values: None }
    }

    /// Reads the options. Information logs stay empty: a successful load has nothing to report.
    pub(super) fn read(count: c_uint, options: In<c_uint>, values: InOut<u64>) -> Result<Self> {
        let count = count as usize;
        let options = options.read_array(count)?;
        let at = |wanted: u32| options.iter().position(|&option| option == wanted);
        let log = match (at(LOG[0]), at(LOG[1])) {
            (Some(buffer), Some(size)) => Some((Buffer::at(values.at(buffer)?), values.at(size)? as u32 as usize)),
            _ => None,
        };
        if let (Some(buffer), Some(size)) = (at(INFO[0]), at(INFO[1])) {
            let place = Buffer::at(values.at(buffer)?);
            if place.is_given() && values.at(size)? as u32 != 0 {
                place.write("", 1)?;
            }
            values.set_at(size, 0);
        }
        Ok(Self { log, length: at(LOG[1]), values: (count > 0).then_some(values) })
    }

    /// Loads. A load error goes to the program's log buffer and to stderr.
    pub(super) fn load<T>(self, load: impl FnOnce() -> std::result::Result<T, LoadError>) -> Result<T> {
        let loaded = load();
        let text = loaded.as_ref().err().map_or("", |refused| refused.log.as_str());
        let mut written = 0;
        if let Some((buffer, room)) = self.log.filter(|(buffer, room)| buffer.is_given() && *room > 0) {
            buffer.write(text, room)?;
            written = text.len().min(room - 1);
        }
        if let (Some(values), Some(index)) = (self.values, self.length) {
            values.set_at(index, written as u64);
        }
        loaded.map_err(|refused| {
            if !refused.log.is_empty() {
                log_stderr(format_args!("a module is refused: {}", refused.log));
            }
            refused.error
        })
    }
}

/// The image at a pointer without a length: text up to its zero byte, or a binary format recognised by its first bytes.
pub(super) fn image(data: In<u8>) -> Result<ModuleImage> {
    let mut text = Vec::new();
    loop {
        match data.at(text.len())? {
            0 => return Ok(ModuleImage::Text(text)),
            byte => text.push(byte),
        }
        if text.len() == 4
            && let Some(what) = binary(&text)
        {
            return Ok(ModuleImage::Binary(what));
        }
    }
}

/// The content of a file.
pub(super) fn file(path: Text) -> Result<ModuleImage> {
    let path = path.bytes()?;
    let path = std::path::Path::new(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&path));
    let mut data = std::fs::read(path).map_err(|error| {
        log_stderr(format_args!("{} cannot be read: {error}", path.display()));
        Error::FileNotFound
    })?;
    if let Some(what) = binary(&data) {
        return Ok(ModuleImage::Binary(what));
    }
    data.truncate(data.iter().position(|&byte| byte == 0).unwrap_or(data.len()));
    Ok(ModuleImage::Text(data))
}

/// The name of the binary format that the data starts with; `None` for text.
fn binary(data: &[u8]) -> Option<&'static str> {
    match data.get(..4)? {
        b"\x7fELF" => Some("machine code (a cubin)"),
        [0x50, 0xed, 0x55, 0xba] | [0xb1, 0x43, 0x62, 0x46] => Some("a fat binary"),
        _ => None,
    }
}
