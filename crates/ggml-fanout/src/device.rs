//! Devices: one object of ggml's for each device of fanout, and the callbacks of it and of its buffer type.

use crate::abi::tables::BufferTypeCallbacks;
use crate::abi::{self, BufferType, DEVICE_TYPE_GPU, DeviceCaps, DeviceProps, DeviceTable, Event, Tensor, v2, v3};
use crate::buffer::BufferState;
use crate::buffer_calls;
use crate::guard::{FailureLog, guarded, lock};
use crate::host::{self, Interface, Shared};
use crate::program_cache::ProgramCache;
use crate::server::{DiskLoads, Restored, Server};
use crate::stream;
use crate::support::{self, SupportCache};
use fanout::device::{Device as FanoutDevice, DeviceError, DeviceInfo, MemoryBudget, MemoryInfo, TimelinePoint};
use queue::SharedQueue;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};

mod queue;

pub(crate) use queue::Ticket;

/// A device of the plug-in. It lives as long as the process.
pub(crate) struct Device {
    name: CString,
    description: CString,
    alignment: usize,
    max_buffer: u64,
    link: RwLock<Link>,
    /// Of a device of a server.
    server: Option<&'static Server>,
    buffers: Mutex<Vec<Weak<BufferState>>>,
    pub(crate) budget: Arc<MemoryBudget>,
    queue: Mutex<SharedQueue>,
    pub(crate) programs: Mutex<ProgramCache>,
    support: SupportCache,
    pub(crate) disk: DiskLoads,
    pub(crate) failures: FailureLog,
    /// A failure that no call could report yet. The next graph on the device fails with it.
    latched: Mutex<Option<String>>,
    /// Whether the host reads results of graphs that are no outputs.
    pub(crate) host_reads: AtomicBool,
    /// The last known state of the memory.
    memory: Mutex<MemoryInfo>,
    object: OnceLock<Shared<abi::Device>>,
    buffer_type: OnceLock<Shared<BufferType>>,
}

/// fanout's device. A server that comes back has another one.
struct Link {
    fanout: Arc<dyn FanoutDevice>,
    /// Counts the devices.
    generation: u64,
    /// Why it cannot be used.
    lost: Option<DeviceError>,
}

#[repr(C)]
struct BufferTypeObject<T> {
    table: T,
    fields: abi::BufferTypeTail,
}

impl Device {
    /// The device that the host names `name`, for the registry `registry`.
    pub(crate) fn new(
        name: String,
        fanout: Arc<dyn FanoutDevice>,
        server: Option<&'static Server>,
        registry: *mut abi::Registry,
    ) -> &'static Device {
        let text = |text: String| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let memory = fanout.memory().unwrap_or(MemoryInfo { free: 0, total: 0 });
        let device = Box::leak(Box::new(Device {
            name: text(name),
            description: text(fanout.info().description.clone()),
            alignment: fanout.info().alignment as usize,
            max_buffer: fanout.info().max_buffer,
            link: RwLock::new(Link { fanout, generation: 0, lost: None }),
            server,
            buffers: Mutex::default(),
            budget: MemoryBudget::new(u64::MAX),
            queue: Mutex::default(),
            programs: Mutex::default(),
            support: SupportCache::default(),
            disk: DiskLoads::default(),
            failures: FailureLog::default(),
            latched: Mutex::default(),
            host_reads: AtomicBool::new(false),
            memory: Mutex::new(memory),
            object: OnceLock::new(),
            buffer_type: OnceLock::new(),
        }));
        let context: *mut c_void = (&raw mut *device).cast();
        let object = Box::into_raw(Box::new(abi::Device { iface: TABLE, registry, context }));
        let _ = device.object.set(Shared(object));
        let fields = abi::BufferTypeTail { device: object, context };
        let buffer_type = match host::get().interface {
            Interface::V2 => {
                let table = v2::BufferTypeTable::from(BUFFER_TYPE);
                Box::into_raw(Box::new(BufferTypeObject { table, fields })).cast()
            }
            Interface::V3 => {
                let table = v3::BufferTypeTable::from(BUFFER_TYPE);
                Box::into_raw(Box::new(BufferTypeObject { table, fields })).cast()
            }
        };
        let _ = device.buffer_type.set(Shared(buffer_type));
        device
    }

    /// The device's object in the host.
    pub(crate) fn object(&self) -> *mut abi::Device {
        self.object.get().map_or(std::ptr::null_mut(), |object| object.0)
    }

    pub(crate) fn buffer_type(&self) -> *mut BufferType {
        self.buffer_type.get().map_or(std::ptr::null_mut(), |object| object.0)
    }

    /// The device of an object.
    ///
    /// # Safety
    /// `object` is an object of the plug-in.
    pub(crate) unsafe fn of(object: *mut abi::Device) -> &'static Device {
        // SAFETY: the context of the plug-in's objects is the device, which is never freed.
        unsafe { &*(*object).context.cast() }
    }

    /// The device of a buffer type.
    ///
    /// # Safety
    /// `buffer_type` is one of the plug-in's.
    unsafe fn of_buffer_type(buffer_type: *mut BufferType) -> &'static Device {
        // SAFETY: as for `of`.
        unsafe { &*host::get().buffer_type_fields(buffer_type).context.cast() }
    }

    /// fanout's device, with its generation.
    ///
    /// # Errors
    /// Its server is lost.
    pub(crate) fn fanout(&self) -> Result<(Arc<dyn FanoutDevice>, u64), DeviceError> {
        let link = self.link.read().unwrap_or_else(PoisonError::into_inner);
        match &link.lost {
            None => Ok((Arc::clone(&link.fanout), link.generation)),
            Some(error) => Err(error.clone()),
        }
    }

    pub(crate) fn alignment(&self) -> usize {
        self.alignment
    }

    /// Whether the device is one of a server, which may be lost and come back.
    pub(crate) fn is_remote(&self) -> bool {
        self.server.is_some()
    }

    /// Starts the recovery of a lost server after a failure of work on the device of `generation`.
    pub(crate) fn report_loss(&self, generation: u64, error: &DeviceError) {
        let current = matches!(self.fanout(), Ok((_, now)) if now == generation);
        if let Some(server) = self.server.filter(|server| current && server.is_lost_by(error)) {
            server.lost(error);
        }
    }

    /// Whether the device is one of a server that does not answer.
    pub(crate) fn is_away(&self) -> bool {
        self.is_remote() && self.query_memory().is_err()
    }

    /// Makes all uses of the device fail until its server is back.
    pub(crate) fn set_lost(&self, error: &DeviceError) {
        self.link.write().unwrap_or_else(PoisonError::into_inner).lost.get_or_insert_with(|| error.clone());
    }

    /// Whether another device of fanout can take the place of this one.
    pub(crate) fn can_become(&self, info: &DeviceInfo) -> bool {
        self.alignment.is_multiple_of(info.alignment as usize)
    }

    /// Installs the device and the memory of a server that is back.
    pub(crate) fn install(&self, restored: Restored) {
        lock(&self.queue).close();
        lock(&self.programs).clear();
        for (buffer, memory) in restored.buffers {
            buffer.install(memory);
        }
        let mut link = self.link.write().unwrap_or_else(PoisonError::into_inner);
        *link = Link { fanout: restored.fanout, generation: link.generation + 1, lost: None };
    }

    /// Buffers that the host has not freed.
    pub(crate) fn live_buffers(&self) -> Vec<Arc<BufferState>> {
        lock(&self.buffers).iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn add_buffer(&self, buffer: &Arc<BufferState>) {
        let mut buffers = lock(&self.buffers);
        buffers.retain(|buffer| buffer.strong_count() > 0);
        buffers.push(Arc::downgrade(buffer));
    }

    /// Keeps a failure for the next graph.
    pub(crate) fn latch(&self, reason: String) {
        lock(&self.latched).get_or_insert(reason);
    }

    /// The failure that was kept, if any.
    pub(crate) fn take_latched(&self) -> Option<String> {
        lock(&self.latched).take()
    }

    fn query_memory(&self) -> Result<MemoryInfo, DeviceError> {
        let (fanout, generation) = self.fanout()?;
        fanout.memory().inspect_err(|error| self.report_loss(generation, error))
    }

    fn memory(&self) -> MemoryInfo {
        match self.query_memory() {
            Ok(memory) => *lock(&self.memory) = memory,
            Err(error) => self.failures.log(format!("{}: {error}", self.label())),
        }
        *lock(&self.memory)
    }

    /// The device's name in the host.
    pub(crate) fn name(&self) -> *const c_char {
        self.name.as_ptr()
    }

    /// A failure as text. That of a lost server is the same whatever met it.
    pub(crate) fn describe_failure(&self, what: &str, error: &DeviceError) -> String {
        match error {
            DeviceError::ConnectionLost { .. } => format!("{}: {error}", self.label()),
            _ => format!("{}: {what}: {error}", self.label()),
        }
    }

    /// The device's name in the host and in fanout, for messages.
    pub(crate) fn label(&self) -> String {
        let link = self.link.read().unwrap_or_else(PoisonError::into_inner);
        format!("{} ({})", self.name.to_string_lossy(), link.fanout.info().name)
    }
}

const BUFFER_TYPE: BufferTypeCallbacks = BufferTypeCallbacks {
    get_name: buffer_type_name,
    alloc_buffer,
    get_alignment,
    get_max_size,
    get_alloc_size,
    is_host,
};

unsafe extern "C" fn buffer_type_name(buffer_type: *mut BufferType) -> *const c_char {
    // SAFETY: the host passes a buffer type of the plug-in.
    unsafe { Device::of_buffer_type(buffer_type) }.name.as_ptr()
}

unsafe extern "C" fn alloc_buffer(buffer_type: *mut BufferType, size: usize) -> *mut abi::Buffer {
    // SAFETY: the host passes a buffer type of the plug-in.
    let device = unsafe { Device::of_buffer_type(buffer_type) };
    guarded(std::ptr::null_mut(), || match BufferState::allocate(device, size) {
        Ok(state) => buffer_calls::into_host(state),
        Err(error) => {
            device.failures.log(format!("{}: a buffer of {size} bytes: {error}", device.label()));
            std::ptr::null_mut()
        }
    })
}

unsafe extern "C" fn get_alignment(buffer_type: *mut BufferType) -> usize {
    // SAFETY: the host passes a buffer type of the plug-in.
    unsafe { Device::of_buffer_type(buffer_type) }.alignment
}

unsafe extern "C" fn get_max_size(buffer_type: *mut BufferType) -> usize {
    // SAFETY: the host passes a buffer type of the plug-in.
    unsafe { Device::of_buffer_type(buffer_type) }.max_buffer as usize
}

unsafe extern "C" fn get_alloc_size(buffer_type: *mut BufferType, tensor: *const Tensor) -> usize {
    // SAFETY: the host passes a buffer type of the plug-in and a tensor.
    let (device, bytes, tensor) =
        unsafe { (Device::of_buffer_type(buffer_type), host::get().tensor_bytes(tensor), &*tensor) };
    guarded(bytes, || match (support::describe(tensor), device.fanout()) {
        (Some(desc), Ok((fanout, _))) => bytes.max(fanout.alloc_size(&desc) as usize),
        _ => bytes,
    })
}

unsafe extern "C" fn is_host(_: *mut BufferType) -> bool {
    false
}

const TABLE: DeviceTable = DeviceTable {
    get_name,
    get_description,
    get_memory,
    get_type,
    get_props,
    init_backend,
    get_buffer_type,
    get_host_buffer_type: None,
    buffer_from_host_ptr: None,
    supports_op,
    supports_buffer_type,
    offload_op,
    event_new: stream::event_new,
    event_free: stream::event_free,
    event_synchronize: stream::event_synchronize,
};

unsafe extern "C" fn get_name(device: *mut abi::Device) -> *const c_char {
    // SAFETY: the host passes a device of the plug-in.
    unsafe { Device::of(device) }.name.as_ptr()
}

unsafe extern "C" fn get_description(device: *mut abi::Device) -> *const c_char {
    // SAFETY: the host passes a device of the plug-in.
    unsafe { Device::of(device) }.description.as_ptr()
}

unsafe extern "C" fn get_memory(device: *mut abi::Device, free: *mut usize, total: *mut usize) {
    // SAFETY: the host passes a device of the plug-in.
    let device = unsafe { Device::of(device) };
    let memory = guarded(MemoryInfo { free: 0, total: 0 }, || device.memory());
    // SAFETY: the host passes two places for numbers.
    unsafe { (*free, *total) = (memory.free as usize, memory.total as usize) };
}

unsafe extern "C" fn get_type(_: *mut abi::Device) -> c_int {
    // Hosts leave weights to devices of this type. A CPU of a server is one for them, too: its memory is not the host's.
    DEVICE_TYPE_GPU
}

unsafe extern "C" fn get_props(device: *mut abi::Device, props: *mut DeviceProps) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the host passes a device of the plug-in, and a place for its properties.
    unsafe {
        get_memory(device, &raw mut free, &raw mut total);
        *props = DeviceProps {
            name: get_name(device),
            description: get_description(device),
            memory_free: free,
            memory_total: total,
            device_type: DEVICE_TYPE_GPU,
            device_id: std::ptr::null(),
            caps: DeviceCaps {
                asynchronous: true,
                host_buffer: false,
                buffer_from_host_ptr: false,
                events: true,
                mmap_support: true,
            },
        };
    }
}

unsafe extern "C" fn init_backend(device: *mut abi::Device, _: *const c_char) -> *mut abi::Backend {
    // SAFETY: the host passes a device of the plug-in.
    let device = unsafe { Device::of(device) };
    guarded(std::ptr::null_mut(), || stream::new(device))
}

unsafe extern "C" fn get_buffer_type(device: *mut abi::Device) -> *mut BufferType {
    // SAFETY: the host passes a device of the plug-in.
    unsafe { Device::of(device) }.buffer_type()
}

unsafe extern "C" fn supports_op(device: *mut abi::Device, node: *const Tensor) -> bool {
    // SAFETY: the host passes a device of the plug-in and a tensor whose sources are tensors.
    let device = unsafe { Device::of(device) };
    // SAFETY: as above.
    guarded(false, || unsafe { device.support.runs(device, &*node) })
}

unsafe extern "C" fn supports_buffer_type(device: *mut abi::Device, buffer_type: *mut BufferType) -> bool {
    // SAFETY: the host passes a device of the plug-in.
    unsafe { Device::of(device) }.buffer_type() == buffer_type
}

unsafe extern "C" fn offload_op(device: *mut abi::Device, node: *const Tensor) -> bool {
    // SAFETY: the host passes a device of the plug-in and a tensor whose sources are tensors.
    let device = unsafe { Device::of(device) };
    // SAFETY: as above.
    guarded(false, || unsafe { device.support.offloads(device, &*node) })
}

/// The type of [`abi::Event::context`].
pub(crate) type EventState = Mutex<Option<TimelinePoint>>;

/// The state of an event.
///
/// # Safety
/// `event` is an event of the plug-in that is not freed while the result is used.
pub(crate) unsafe fn event_state<'a>(event: *mut Event) -> &'a EventState {
    // SAFETY: the context of the plug-in's events is their state.
    unsafe { &*(*event).context.cast() }
}
