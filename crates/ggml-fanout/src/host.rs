//! The host: the ggml library of this process that loads the plug-in. Finds its functions and the version of its interface.
//!
//! The plug-in is not linked to ggml: a process may have loaded it into a scope of its own, as Python's ctypes does. So the
//! symbols are looked up in every library that the process has loaded.

use crate::abi::{self, Buffer, BufferTail, BufferType, BufferTypeTail, Graph, Registry, Tensor, v2, v3};
use crate::numbers::Numbers;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// A version of ggml that the plug-in is tested with: its name, the version of its interface, and how many ops, kinds of unary
/// ops, kinds of gated units and types it has. ggml does not check numbers that it is asked the name of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tested {
    pub(crate) version: &'static str,
    pub(crate) interface: Interface,
    /// Whether buffers take lists of tensors.
    pub(crate) lists: bool,
    pub(crate) ops: u32,
    pub(crate) unary_ops: u32,
    pub(crate) gated_units: u32,
    pub(crate) types: u32,
}

pub(crate) const TESTED: &[Tested] = &[
    // whisper.cpp 1.8
    Tested {
        version: "0.13.1",
        interface: Interface::V2,
        lists: false,
        ops: 96,
        unary_ops: 22,
        gated_units: 6,
        types: 42,
    },
    // llama.cpp 7.0
    Tested {
        version: "0.25.3",
        interface: Interface::V2,
        lists: false,
        ops: 101,
        unary_ops: 22,
        gated_units: 7,
        types: 43,
    },
    // llama-cpp-2 0.1.160
    Tested {
        version: "0.26.0",
        interface: Interface::V3,
        lists: false,
        ops: 101,
        unary_ops: 22,
        gated_units: 7,
        types: 43,
    },
    // llama.cpp 8.0.1
    Tested {
        version: "0.28.0",
        interface: Interface::V3,
        lists: true,
        ops: 102,
        unary_ops: 22,
        gated_units: 7,
        types: 44,
    },
];

/// The variable that lets another version of ggml load the plug-in as if it were the tested one that it names.
const AS_VERSION: &str = "FANOUT_GGML_AS";

/// The version of the interface between a host and its backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Interface {
    V2,
    V3,
}

type InitBufferPlain = unsafe extern "C" fn(*mut BufferType, v2::BufferTable, *mut c_void, usize) -> *mut Buffer;
type InitBufferLists = unsafe extern "C" fn(*mut BufferType, v3::BufferTable, *mut c_void, usize) -> *mut Buffer;

/// Creates the host's object for a buffer, which the host frees: for buffers that take lists of tensors, or not.
enum InitBuffer {
    Plain(InitBufferPlain),
    Lists(InitBufferLists),
}

/// The functions of the host.
pub(crate) struct Host {
    pub(crate) interface: Interface,
    pub(crate) numbers: Numbers,
    init_buffer: InitBuffer,
    graph_size: unsafe extern "C" fn(*mut Graph) -> c_int,
    graph_node: unsafe extern "C" fn(*mut Graph, c_int) -> *mut Tensor,
    tensor_bytes: unsafe extern "C" fn(*const Tensor) -> usize,
    register: Option<unsafe extern "C" fn(*mut Registry)>,
    registry_by_name: Option<unsafe extern "C" fn(*const c_char) -> *mut Registry>,
    log: LogFunction,
}

type LogFunction = unsafe extern "C" fn(c_int, *const c_char, ...);

static HOST: OnceLock<Result<Host, String>> = OnceLock::new();

/// The host of this process, or why the plug-in does not serve it.
pub(crate) fn find() -> Result<&'static Host, &'static str> {
    HOST.get_or_init(Host::find).as_ref().map_err(String::as_str)
}

/// The host, if it was found.
pub(crate) fn found() -> Option<&'static Host> {
    HOST.get()?.as_ref().ok()
}

/// The host, which exists while any of its callbacks runs.
pub(crate) fn get() -> &'static Host {
    match find() {
        Ok(host) => host,
        // A host calls only what `ggml_backend_init` gave it, and that needs a host.
        Err(reason) => unreachable!("a callback without a host: {reason}"),
    }
}

impl Host {
    fn find() -> Result<Host, String> {
        let libraries = Libraries::loaded();
        let version = libraries.required(c"ggml_version")?;
        // SAFETY: the function of ggml with this name takes nothing and returns a static string.
        let version = unsafe { CStr::from_ptr(std::mem::transmute::<*mut c_void, StringFunction>(version)()) };
        let version = version.to_string_lossy().into_owned();
        let has_version_3 = libraries.symbol(c"ggml_backend_buft_alloc_buffer_n")?.is_some();
        let interface = if has_version_3 { Interface::V3 } else { Interface::V2 };
        let assumed = std::env::var(AS_VERSION).ok();
        let tested = tested_version(&version, interface, assumed.as_deref())?;
        let init_buffer = libraries.required(c"ggml_backend_buffer_init")?;
        // SAFETY: each transmute is from the address of the function of ggml with that name to its signature in the tested
        // versions of ggml.
        unsafe {
            Ok(Host {
                interface,
                numbers: Numbers::of_host(&libraries, &tested)?,
                init_buffer: match tested.lists {
                    false => InitBuffer::Plain(std::mem::transmute::<*mut c_void, InitBufferPlain>(init_buffer)),
                    true => InitBuffer::Lists(std::mem::transmute::<*mut c_void, InitBufferLists>(init_buffer)),
                },
                graph_size: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Graph) -> c_int>(
                    libraries.required(c"ggml_graph_n_nodes")?,
                ),
                graph_node: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Graph, c_int) -> *mut Tensor>(
                    libraries.required(c"ggml_graph_node")?,
                ),
                tensor_bytes: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const Tensor) -> usize>(
                    libraries.required(c"ggml_nbytes")?,
                ),
                register: libraries
                    .symbol(c"ggml_backend_register")?
                    .map(|at| std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Registry)>(at)),
                registry_by_name: libraries.symbol(c"ggml_backend_reg_by_name")?.map(|at| {
                    std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> *mut Registry>(at)
                }),
                log: std::mem::transmute::<*mut c_void, LogFunction>(libraries.required(c"ggml_log_internal")?),
            })
        }
    }

    /// Writes a line to the host's log.
    pub(crate) fn log(&self, level: c_int, line: &CStr) {
        // SAFETY: `log` has the signature of ggml_log_internal, and the format takes one string that ends with a zero.
        unsafe { (self.log)(level, c"%s".as_ptr(), line.as_ptr()) };
    }

    /// The number of the interface for [`Registry::api_version`].
    pub(crate) fn api_version(&self) -> c_int {
        match self.interface {
            Interface::V2 => v2::VERSION,
            Interface::V3 => v3::VERSION,
        }
    }

    /// Creates the host's object for a buffer of `size` bytes; null if the host has no memory.
    ///
    /// # Safety
    /// `buffer_type` is one of the plug-in's, and `context` what the buffer's callbacks expect.
    pub(crate) unsafe fn new_buffer(
        &self,
        buffer_type: *mut BufferType,
        callbacks: abi::tables::BufferCallbacks,
        context: *mut c_void,
        size: usize,
    ) -> *mut Buffer {
        // SAFETY: the caller passes a valid buffer type and context; the table has the layout of the host's interface.
        unsafe {
            match self.init_buffer {
                InitBuffer::Plain(init) => init(buffer_type, callbacks.into(), context, size),
                InitBuffer::Lists(init) => init(buffer_type, callbacks.into(), context, size),
            }
        }
    }

    /// The fields of a buffer after its callbacks.
    ///
    /// # Safety
    /// `buffer` is a buffer of the host that is not freed while the result is used.
    pub(crate) unsafe fn buffer_fields<'a>(&self, buffer: *mut Buffer) -> &'a BufferTail {
        let table = match self.init_buffer {
            InitBuffer::Plain(_) => size_of::<v2::BufferTable>(),
            InitBuffer::Lists(_) => size_of::<v3::BufferTable>(),
        };
        // SAFETY: the caller passes a valid buffer, whose fields follow the table of the host's interface.
        unsafe { &*buffer.byte_add(table).cast() }
    }

    /// The callback of a buffer that frees it, which is the first of its table.
    ///
    /// # Safety
    /// As for [`Host::buffer_fields`].
    pub(crate) unsafe fn free_callback(&self, buffer: *mut Buffer) -> usize {
        // SAFETY: the caller passes a valid buffer, which starts with its table.
        unsafe { *buffer.cast::<usize>() }
    }

    /// The fields of a buffer type after its callbacks.
    ///
    /// # Safety
    /// `buffer_type` is a buffer type of the plug-in, which lives as long as the process.
    pub(crate) unsafe fn buffer_type_fields(&self, buffer_type: *mut BufferType) -> &'static BufferTypeTail {
        let table = match self.interface {
            Interface::V2 => size_of::<v2::BufferTypeTable>(),
            Interface::V3 => size_of::<v3::BufferTypeTable>(),
        };
        // SAFETY: the caller passes a valid buffer type, whose fields follow the table of the host's interface.
        unsafe { &*buffer_type.byte_add(table).cast() }
    }

    /// The nodes of a graph in execution order.
    ///
    /// # Safety
    /// `graph` is a graph of the host that does not change while the iterator is used.
    pub(crate) unsafe fn nodes(&self, graph: *mut Graph) -> impl ExactSizeIterator<Item = *mut Tensor> + use<'_> {
        // SAFETY: the caller passes a valid graph.
        let count = unsafe { (self.graph_size)(graph) }.max(0);
        // SAFETY: as above, and the index is below the number of nodes.
        (0..count as usize).map(move |at| unsafe { (self.graph_node)(graph, at as c_int) })
    }

    /// Bytes from the first to the last byte of a tensor.
    ///
    /// # Safety
    /// `tensor` is a tensor of the host.
    pub(crate) unsafe fn tensor_bytes(&self, tensor: *const Tensor) -> usize {
        // SAFETY: the caller passes a valid tensor.
        unsafe { (self.tensor_bytes)(tensor) }
    }

    /// Registers a second registry, unless the host has one of that name.
    ///
    /// # Safety
    /// `registry` lives as long as the process.
    pub(crate) unsafe fn register_if_missing(&self, name: &CStr, registry: *mut Registry) {
        let (Some(register), Some(by_name)) = (self.register, self.registry_by_name) else { return };
        // SAFETY: both are functions of the host; the caller passes a registry that stays.
        unsafe {
            if by_name(name.as_ptr()).is_null() {
                register(registry);
            }
        }
    }
}

type StringFunction = unsafe extern "C" fn() -> *const c_char;

/// The tested version to treat the host as.
fn tested_version(version: &str, interface: Interface, assumed: Option<&str>) -> Result<Tested, String> {
    let wanted = assumed.unwrap_or(version);
    match TESTED.iter().find(|tested| tested.version == wanted) {
        Some(tested) if tested.interface == interface => Ok(*tested),
        Some(_) => Err(format!("ggml {version} has another interface than {wanted}, which {AS_VERSION} names")),
        None => {
            let known = TESTED.iter().map(|tested| tested.version).collect::<Vec<_>>().join(", ");
            Err(match assumed {
                Some(wanted) => {
                    format!("{wanted}, which {AS_VERSION} names, is not among the tested versions, {known}")
                }
                None => format!(
                    "ggml {version} is not among the tested versions, {known}; {AS_VERSION}=VERSION treats it as one of \
                     them, at your own risk"
                ),
            })
        }
    }
}

/// The libraries that the process has loaded.
pub(crate) struct Libraries(Vec<CString>);

impl Libraries {
    fn loaded() -> Libraries {
        unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, names: *mut c_void) -> c_int {
            // SAFETY: the loader passes a valid description, and `names` is the list below.
            let (info, names) = unsafe { (&*info, &mut *names.cast::<Vec<CString>>()) };
            if !info.dlpi_name.is_null() {
                // SAFETY: the loader's names end with a zero.
                names.push(unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned());
            }
            0
        }
        let mut names: Vec<CString> = Vec::new();
        // SAFETY: `collect` has the signature that the loader calls, and the list outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut names).cast()) };
        Libraries(names)
    }

    /// The address of a symbol; `None` if no library has it.
    pub(crate) fn symbol(&self, name: &CStr) -> Result<Option<*mut c_void>, String> {
        let mut found = BTreeSet::new();
        for library in &self.0 {
            // The program itself has no name.
            let path = if library.is_empty() { std::ptr::null() } else { library.as_ptr() };
            // SAFETY: the path is a string of C or null; RTLD_NOLOAD opens only what is loaded already, so no code runs.
            let handle = unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
            if handle.is_null() {
                continue;
            }
            // SAFETY: the handle is open, and the name is a string of C.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            // SAFETY: the handle is open, and the process keeps its own handle of the library.
            unsafe { libc::dlclose(handle) };
            if !address.is_null() {
                found.insert(address as usize);
            }
        }
        match (found.pop_first(), found.len()) {
            (first, 0) => Ok(first.map(|address| address as *mut c_void)),
            (_, _) => Err(format!(
                "the process has several libraries with {}, and only one can be served",
                name.to_string_lossy()
            )),
        }
    }

    /// The address of a symbol that every tested version has.
    pub(crate) fn required(&self, name: &CStr) -> Result<*mut c_void, String> {
        let missing = || {
            format!("the process has no shared library with {}: its ggml is linked statically", name.to_string_lossy())
        };
        self.symbol(name)?.ok_or_else(missing)
    }
}

// SAFETY: function pointers of a library that stays loaded; ggml's functions that the plug-in calls may be called on any thread.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

/// A pointer to an object of the plug-in, as hosts hold it: `*mut Backend` and its like in structs that are shared.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(pub(crate) *mut T);

// SAFETY: the objects behind it are made once and never change, or have locks of their own.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

/// The identity of the plug-in's backends, which hosts compare.
pub(crate) static GUID: [u8; 16] = *b"fanout-ggml-0001";

/// The guid's address in the form of [`Backend::guid`].
pub(crate) fn guid() -> *const [u8; 16] {
    &raw const GUID
}
