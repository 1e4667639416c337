//! FFI guard: wrappers that turn C pointers, strings and arrays into typed values, and [`guard_call`], which turns errors and
//! panics into a `CUresult`. All raw pointer accesses of `abi` are here.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::console::log_stderr;
use crate::counts::count_call;
use crate::driver::{Driver, StateGuard, driver};
use crate::error::{Error, Result};

/// Defines exported C functions that return a `CUresult`.
macro_rules! api {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            // SAFETY: the symbol name is one of the CUDA driver's. A process that loads this library loads no other that
            // defines it.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $ty),*) -> u32 {
                $crate::abi::ffi_guard::guard_call(stringify!($name), move || $body)
            }
        )*
    };
}
pub(in crate::abi) use api;

/// Runs the body of an exported function, unless this call has to fail (`CUDAEMU_FAIL_CALL`). An error becomes its `CUresult`; a panic is caught and becomes one as well, because
/// it must not unwind into C.
pub(in crate::abi) fn guard_call(name: &'static str, body: impl FnOnce() -> Result<()>) -> u32 {
    if let Some(code) = count_call(name) {
        return code;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.code(),
        Err(_) => {
            log_stderr(format_args!("{name} panicked: the emulator is at fault, please report it"));
            Error::Unknown.code()
        }
    }
}

/// Calls `body` with the driver and its locked state.
pub(in crate::abi) fn with_state<R>(body: impl FnOnce(&Driver, &mut StateGuard<'_>) -> Result<R>) -> Result<R> {
    let driver = driver()?;
    let mut state = driver.lock();
    body(&driver, &mut state)
}

/// An output parameter: a pointer to memory for one or several `T`, or null.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Fails if the pointer is null.
    pub(in crate::abi) fn check_not_null(&self) -> Result<()> {
        if self.0.is_null() { Err(Error::InvalidValue) } else { Ok(()) }
    }

    /// Whether the pointer is not null.
    pub(in crate::abi) fn is_given(&self) -> bool {
        !self.0.is_null()
    }

    /// Computes the value and writes it; a null pointer fails before anything is computed.
    pub(in crate::abi) fn write_with(self, value: impl FnOnce() -> Result<T>) -> Result<()> {
        self.check_not_null()?;
        let value = value()?;
        self.set(value);
        Ok(())
    }

    /// Writes the value unless the pointer is null.
    pub(in crate::abi) fn set(self, value: T) {
        if self.is_given() {
            // SAFETY: the caller promises that an output pointer that is not null points to writable memory for a `T`.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Writes element `index` of an output array, unless the pointer is null.
    pub(in crate::abi) fn set_at(self, index: usize, value: T) {
        if self.is_given() {
            // SAFETY: the caller promises an array of the length that it passed as count; `index` is below that.
            unsafe { self.0.add(index).write_unaligned(value) }
        }
    }
}

/// An input parameter: a pointer to one or several `T`, or null.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Whether the pointer is not null.
    pub(in crate::abi) fn is_given(&self) -> bool {
        !self.0.is_null()
    }

    /// Reads the value; a null pointer fails.
    pub(in crate::abi) fn get(self) -> Result<T> {
        self.at(0)
    }

    /// Reads element `index` of an input array; a null pointer fails.
    pub(in crate::abi) fn at(self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Error::InvalidValue);
        }
        // SAFETY: the caller promises that a pointer that is not null points to as many `T` as the count that it passed;
        // `index` is below that.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// Reads all `count` elements of an input array.
    pub(in crate::abi) fn read_array(self, count: usize) -> Result<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }
}

/// A pointer to values that are read and then overwritten.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct InOut<T>(*mut T);

impl<T: Copy> InOut<T> {
    /// Reads element `index`; a null pointer fails.
    pub(in crate::abi) fn at(self, index: usize) -> Result<T> {
        In(self.0.cast_const()).at(index)
    }

    /// Writes element `index`, unless the pointer is null.
    pub(in crate::abi) fn set_at(self, index: usize, value: T) {
        Out(self.0).set_at(index, value);
    }
}

/// An input C string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Text(*const c_char);

impl Text {
    /// The bytes without the terminating zero; a null pointer fails.
    pub(in crate::abi) fn bytes(self) -> Result<Vec<u8>> {
        if self.0.is_null() {
            return Err(Error::InvalidValue);
        }
        // SAFETY: the caller promises a zero-terminated string.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes().to_vec())
    }

    /// The string as UTF-8. A null pointer fails, and so does invalid UTF-8 (no name of a PTX module contains any).
    pub(in crate::abi) fn read(self) -> Result<String> {
        String::from_utf8(self.bytes()?).map_err(|_| Error::InvalidValue)
    }
}

/// An output buffer for a C string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Buffer(*mut c_char);

impl Buffer {
    /// The buffer at an address that the program passed as a number.
    pub(in crate::abi) fn at(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(address as usize))
    }

    /// Whether the pointer is not null.
    pub(in crate::abi) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// Writes as much of the text as fits into `room` bytes, and a terminating zero. A null pointer and a `room` of 0 fail.
    pub(in crate::abi) fn write(self, text: &str, room: usize) -> Result<()> {
        if self.0.is_null() || room == 0 {
            return Err(Error::InvalidValue);
        }
        let count = text.len().min(room - 1);
        // SAFETY: the caller promises `room` bytes; `count` and the zero together are at most that.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), self.0, count);
            self.0.add(count).write(0);
        }
        Ok(())
    }
}

/// A pointer of the program that is only passed back to the program.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Opaque(pub(in crate::abi) *mut c_void);

// SAFETY: this library never dereferences the pointer. It only passes it back to a function of the program, which the program
// made for that.
unsafe impl Send for Opaque {}
// SAFETY: as above.
unsafe impl Sync for Opaque {}
