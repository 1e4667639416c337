//! The registry: the plug-in's devices, as a host lists them. And a second registry named RPC, for hosts that have none: it
//! connects to servers that a user names in the host (`--rpc` of llama.cpp).

use crate::abi::{Device as DeviceObject, Registry, RegistryTable};
use crate::config::Config;
use crate::device::Device;
use crate::guard::{self, guarded, lock};
use crate::host::{self, Shared};
use crate::host_log::{self, LogLevel, log};
use crate::server::Server;
use fanout::device::Device as FanoutDevice;
use fanout::registry as devices;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Arc, Mutex, OnceLock};

/// The devices of a registry. It lives as long as the process.
struct DeviceList {
    name: CString,
    devices: Vec<&'static Device>,
}

/// How many devices were opened, which numbers the next ones.
static OPENED: Mutex<usize> = Mutex::new(0);

static OWN: OnceLock<Shared<Registry>> = OnceLock::new();
static RPC: OnceLock<Shared<Registry>> = OnceLock::new();

/// The plug-in's registry, which the first call fills with devices.
pub(crate) fn own() -> *mut Registry {
    OWN.get_or_init(|| {
        host_log::forward_log();
        guard::watch_forks();
        let config = Config::read().unwrap_or_else(|e| {
            log(LogLevel::Error, &format!("no device is opened: {e}"));
            Config { devices: Some(NO_DEVICES.to_owned()), ..Config::default() }
        });
        let registry = new(c"Fanout", OWN_TABLE);
        fill(registry, registry, open_local(&config), None, &config.names);
        #[cfg(feature = "client")]
        for server in &config.servers {
            fill_from_server(registry, registry, server, &config);
        }
        let rpc = new(c"RPC", RPC_TABLE);
        _ = RPC.set(Shared(rpc));
        #[cfg(feature = "client")]
        // SAFETY: registries are never freed.
        unsafe {
            host::get().register_if_missing(c"RPC", rpc)
        };
        Shared(registry)
    })
    .0
}

/// The list of devices that has none.
const NO_DEVICES: &str = "none";

fn open_local(config: &Config) -> Vec<Arc<dyn FanoutDevice>> {
    let registry = machine();
    match config.devices.as_deref() {
        Some(NO_DEVICES) => Vec::new(),
        Some(list) => open(list, &config.options),
        None => {
            let (list, notes) = registry.default_list();
            // Without a GPU the list is the CPU, which the host has itself.
            if registry.no_gpu_reason().is_none() {
                return open(&list, &config.options);
            }
            if config.servers.is_empty() {
                notes.iter().for_each(|note| log(LogLevel::Info, &format!("no device of this machine: {note}")));
            }
            Vec::new()
        }
    }
}

/// Opens the devices of a list; none if one of them cannot be opened.
fn open(list: &str, options: &devices::Options) -> Vec<Arc<dyn FanoutDevice>> {
    open_devices(list, options).unwrap_or_else(|error| {
        log(LogLevel::Error, &format!("{list} has no devices here: {error}"));
        Vec::new()
    })
}

/// The devices of this machine, which the first call enumerates.
fn machine() -> &'static devices::Registry {
    static MACHINE: OnceLock<devices::Registry> = OnceLock::new();
    MACHINE.get_or_init(devices::Registry::detect)
}

/// Opens the devices of a list.
pub(crate) fn open_devices(list: &str, options: &devices::Options) -> Result<Vec<Arc<dyn FanoutDevice>>, String> {
    machine().open(list, options).map_err(|e| e.to_string())
}

/// Adds the devices of a server; none if it is not there.
fn fill_from_server(registry: *mut Registry, owner: *mut Registry, name: &str, config: &Config) {
    let opened = open(name, &config.options);
    let options = without_retry(config.options.clone());
    let server = Server::new(name, &options, config.models.clone());
    server.set_devices(fill(registry, owner, opened, Some(server), &config.names));
}

/// The options of one attempt to connect.
fn without_retry(options: devices::Options) -> devices::Options {
    #[cfg(feature = "client")]
    {
        let rpc = options.rpc.clone().with_retry(std::time::Duration::ZERO);
        options.with_rpc(rpc)
    }
    #[cfg(not(feature = "client"))]
    options
}

/// A registry without devices.
fn new(name: &CStr, iface: RegistryTable) -> *mut Registry {
    let list = Box::new(DeviceList { name: name.to_owned(), devices: Vec::new() });
    let api_version = host::get().api_version();
    Box::into_raw(Box::new(Registry { api_version, iface, context: Box::into_raw(list).cast() }))
}

/// Adds devices to a registry that the host does not have yet. `owner` is the registry that hosts find the devices' functions in.
fn fill(
    registry: *mut Registry,
    owner: *mut Registry,
    opened: Vec<Arc<dyn FanoutDevice>>,
    server: Option<&'static Server>,
    names: &[String],
) -> Vec<&'static Device> {
    let mut count = lock(&OPENED);
    let device = |device| {
        let name = names.get(*count).cloned().unwrap_or_else(|| format!("Fanout{}", *count));
        *count += 1;
        Device::new(name, device, server, owner)
    };
    let devices: Vec<&'static Device> = opened.into_iter().map(device).collect();
    // SAFETY: the registry was made by `new`, and no other thread has it.
    unsafe { (*(*registry).context.cast::<DeviceList>()).devices.extend(&devices) };
    devices
}

/// The list of a registry.
///
/// # Safety
/// `registry` was made by [`new`], and the host has it.
unsafe fn list(registry: *mut Registry) -> &'static DeviceList {
    // SAFETY: the context of the plug-in's registries is their list, which does not change once the host has it.
    unsafe { &*(*registry).context.cast() }
}

const OWN_TABLE: RegistryTable =
    RegistryTable { get_name, get_device_count, get_device, get_proc_address: no_proc_address };

const RPC_TABLE: RegistryTable = RegistryTable { get_name, get_device_count, get_device, get_proc_address };

unsafe extern "C" fn get_name(registry: *mut Registry) -> *const c_char {
    // SAFETY: the host passes a registry of the plug-in.
    unsafe { list(registry) }.name.as_ptr()
}

unsafe extern "C" fn get_device_count(registry: *mut Registry) -> usize {
    // SAFETY: the host passes a registry of the plug-in.
    unsafe { list(registry) }.devices.len()
}

unsafe extern "C" fn get_device(registry: *mut Registry, index: usize) -> *mut DeviceObject {
    // SAFETY: the host passes a registry of the plug-in.
    let devices = &unsafe { list(registry) }.devices;
    devices.get(index).map_or(std::ptr::null_mut(), |device| device.object())
}

unsafe extern "C" fn no_proc_address(_: *mut Registry, _: *const c_char) -> *mut c_void {
    std::ptr::null_mut()
}

unsafe extern "C" fn get_proc_address(_: *mut Registry, name: *const c_char) -> *mut c_void {
    // SAFETY: the host passes a string of C.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"ggml_backend_rpc_add_server" => add_server as *mut c_void,
        _ => std::ptr::null_mut(),
    }
}

/// `ggml_backend_rpc_add_server`: the registry of a server's devices; null if there are none.
unsafe extern "C" fn add_server(endpoint: *const c_char) -> *mut Registry {
    static SERVERS: Mutex<BTreeMap<String, Shared<Registry>>> = Mutex::new(BTreeMap::new());
    guarded(std::ptr::null_mut(), || {
        // SAFETY: the host passes a string of C.
        let endpoint = unsafe { CStr::from_ptr(endpoint) }.to_string_lossy().into_owned();
        let mut servers = lock(&SERVERS);
        if let Some(known) = servers.get(&endpoint) {
            return known.0;
        }
        let config = match Config::read() {
            Ok(config) => config,
            Err(e) => {
                log(LogLevel::Error, &format!("{endpoint} is not opened: {e}"));
                return std::ptr::null_mut();
            }
        };
        let name = CString::new(format!("RPC[{endpoint}]")).unwrap_or_default();
        let registry = new(&name, OWN_TABLE);
        // Hosts find devices of `--rpc` by the name of their registry.
        let owner = RPC.get().map_or(registry, |rpc| rpc.0);
        fill_from_server(registry, owner, &endpoint, &config);
        // SAFETY: the registry was made above.
        if unsafe { list(registry) }.devices.is_empty() {
            return std::ptr::null_mut();
        }
        servers.insert(endpoint, Shared(registry));
        registry
    })
}
