//! From C to typed values, and back.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::console::log_stderr;
use crate::counts::count_call;
use crate::driver::{Driver, StateGuard, driver};
use crate::error::{Error, Result};

/// Defines C functions that answer a `CUresult`, and lists them for `cuGetProcAddress`.
macro_rules! api {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            // SAFETY: the name is the driver's, and no other library of a process that uses this one defines it.
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $ty),*) -> u32 {
                $crate::abi::ffi_guard::guard_call(stringify!($name), move || $body)
            }
        )*

        /// Name and address of each function here.
        pub(in crate::abi) fn entries() -> Vec<(&'static str, *const std::ffi::c_void)> {
            vec![$((stringify!($name), $name as *const std::ffi::c_void)),*]
        }
    };
}
pub(in crate::abi) use api;

/// Runs a function's body; its error becomes the code, and so does a panic.
pub(in crate::abi) fn guard_call(name: &'static str, body: impl FnOnce() -> Result<()>) -> u32 {
    count_call(name);
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.code(),
        Err(_) => {
            log_stderr(format_args!("{name} panicked: the emulator is at fault, please report it"));
            Error::Unknown.code()
        }
    }
}

/// Does something with the driver and its locked state.
pub(in crate::abi) fn with_state<R>(body: impl FnOnce(&Driver, &mut StateGuard<'_>) -> Result<R>) -> Result<R> {
    let driver = driver()?;
    let mut state = driver.lock();
    body(&driver, &mut state)
}

/// A pointer to a place for an answer.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// A place that a program says is at an address.
    pub(in crate::abi) fn new(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(address as usize))
    }

    /// Fails for null.
    pub(in crate::abi) fn check_not_null(&self) -> Result<()> {
        if self.0.is_null() { Err(Error::InvalidValue) } else { Ok(()) }
    }

    /// Whether there is a place.
    pub(in crate::abi) fn is_given(&self) -> bool {
        !self.0.is_null()
    }

    /// Answers; nothing is computed where there is no place for it.
    pub(in crate::abi) fn write_with(self, value: impl FnOnce() -> Result<T>) -> Result<()> {
        self.check_not_null()?;
        let value = value()?;
        self.set(value);
        Ok(())
    }

    /// Writes, if there is a place.
    pub(in crate::abi) fn set(self, value: T) {
        if self.is_given() {
            // SAFETY: the caller promises that a pointer for an answer that is not null points to a place for a `T`.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Writes the `index`-th of several places.
    pub(in crate::abi) fn set_at(self, index: usize, value: T) {
        if self.is_given() {
            // SAFETY: the caller promises an array as long as the count that it gave with it, and `index` is below that.
            unsafe { self.0.add(index).write_unaligned(value) }
        }
    }
}

/// A pointer to something to read.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// What a program says is at an address.
    pub(in crate::abi) fn new(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance(address as usize))
    }

    /// Nothing.
    pub(in crate::abi) fn null() -> Self {
        Self(std::ptr::null())
    }

    /// Whether there is something.
    pub(in crate::abi) fn is_given(&self) -> bool {
        !self.0.is_null()
    }

    /// Reads; null fails.
    pub(in crate::abi) fn get(self) -> Result<T> {
        self.at(0)
    }

    /// Reads the `index`-th of several.
    pub(in crate::abi) fn at(self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Error::InvalidValue);
        }
        // SAFETY: the caller promises that a pointer that is not null points to as many `T` as the count given with it, and `index`
        // is below that.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// Reads all of an array.
    pub(in crate::abi) fn read_array(self, count: usize) -> Result<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }
}

/// A pointer to something that is read and written.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct InOut<T>(*mut T);

impl<T: Copy> InOut<T> {
    /// Gives what is there to the function, and puts its answer there; null fails.
    pub(in crate::abi) fn exchange(self, exchange: impl FnOnce(T) -> Result<T>) -> Result<()> {
        let new = exchange(In(self.0.cast_const()).get()?)?;
        Out(self.0).set(new);
        Ok(())
    }

    /// Reads the `index`-th of several; null fails.
    pub(in crate::abi) fn at(self, index: usize) -> Result<T> {
        In(self.0.cast_const()).at(index)
    }

    /// Writes the `index`-th of several places.
    pub(in crate::abi) fn set_at(self, index: usize, value: T) {
        Out(self.0).set_at(index, value);
    }
}

/// A C string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Text(*const c_char);

impl Text {
    /// Its bytes; null fails.
    pub(in crate::abi) fn bytes(self) -> Result<Vec<u8>> {
        if self.0.is_null() {
            return Err(Error::InvalidValue);
        }
        // SAFETY: the caller promises a zero-terminated string.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes().to_vec())
    }

    /// As text; null fails, and so does what is no UTF-8 (no name is that).
    pub(in crate::abi) fn read(self) -> Result<String> {
        String::from_utf8(self.bytes()?).map_err(|_| Error::InvalidValue)
    }
}

/// A buffer for a string.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Buffer(*mut c_char);

impl Buffer {
    /// One at an address that came as a number.
    pub(in crate::abi) fn at(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(address as usize))
    }

    /// Whether there is one.
    pub(in crate::abi) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// Writes as much as fits, and a zero. Null, and no room for the zero, fail.
    pub(in crate::abi) fn write(self, text: &str, room: usize) -> Result<()> {
        if self.0.is_null() || room == 0 {
            return Err(Error::InvalidValue);
        }
        let count = text.len().min(room - 1);
        // SAFETY: the caller promises `room` bytes, and `count` and the zero are at most that.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), self.0, count);
            self.0.add(count).write(0);
        }
        Ok(())
    }
}

/// Any pointer that is only passed on.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(in crate::abi) struct Opaque(pub(in crate::abi) *mut c_void);

impl Opaque {
    /// Its number.
    pub(in crate::abi) fn address(self) -> u64 {
        self.0.expose_provenance() as u64
    }
}

// SAFETY: it is not dereferenced here; the program that gave it to be passed to its own function answers for what that does.
unsafe impl Send for Opaque {}
// SAFETY: as above.
unsafe impl Sync for Opaque {}
