//! `rpc-server doctor --ggml`: whether a program with a given ggml can load the plug-in. The plug-in itself decides it, as in the
//! program: both libraries are loaded into this process.

#![allow(unsafe_code)] // one of the modules that tests/layout lists: libraries are loaded, and their functions called, by unsafe calls

use std::env;
use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::report::{Finding, Report};

/// The variable by which programs find the plug-in.
const PLUGIN_VARIABLE: &str = "GGML_BACKEND_PATH";

/// The plug-in's names: in archives, and as cargo builds it.
const PLUGIN_NAMES: [&str; 2] = ["libggml-fanout.so", "libggml_fanout.so"];

const CHECK: &str = "plug-in";

/// Checks whether the plug-in fits a program's `libggml-base.so`.
pub(super) fn check(report: &mut Report, ggml: &Path) {
    report.begin(&ggml.display().to_string());
    report.add(finding(ggml));
}

fn finding(ggml: &Path) -> Finding {
    // Without a slash, the loader would search for the library elsewhere.
    if let Err(e) = ggml.canonicalize().map_err(|e| e.to_string()).and_then(|path| load(&path)) {
        let remedy = "name the libggml-base.so of the program: `ldd PROGRAM` shows it. A program without one is linked \
                      statically, and cannot load backends";
        return Finding::problem("ggml", format!("cannot be loaded: {e}"), remedy);
    }
    let Some(plugin) = find_plugin() else {
        let names = PLUGIN_NAMES[0];
        let remedy = "it is in the archives for glibc; `cargo build --release -p ggml-fanout` builds it";
        return Finding::problem(
            CHECK,
            format!("{names} is neither in {PLUGIN_VARIABLE} nor beside this program"),
            remedy,
        );
    };
    let name = plugin.display();
    let absolute = plugin.canonicalize().map_err(|e| e.to_string());
    match absolute.and_then(|path| load(&path)).and_then(refusal) {
        Ok(None) => Finding::ok(CHECK, format!("programs with this ggml load {name}")),
        Ok(Some(reason)) => Finding::problem(
            CHECK,
            format!("programs with this ggml do not load {name}: {reason}"),
            "see docs/ggml-plugin.md",
        ),
        Err(e) => Finding::problem(CHECK, format!("{name}: {e}"), "use the plug-in of this version of rpc-server"),
    }
}

/// The plug-in that the variable names, else the one beside this program.
fn find_plugin() -> Option<PathBuf> {
    let named = env::var_os(PLUGIN_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let beside = || {
        let program = env::current_exe().ok()?;
        PLUGIN_NAMES.iter().map(|name| program.with_file_name(name)).find(|path| path.exists())
    };
    named.or_else(beside)
}

/// A library that stays loaded.
struct Library(*mut c_void);

/// Loads a library, and runs its initialisation.
fn load(path: &Path) -> Result<Library, String> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: the path is a string of C. The initialisation of a library that the user names runs with the user's rights, as in the
    // program that is asked about.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() { Err(loader_error()) } else { Ok(Library(handle)) }
}

fn loader_error() -> String {
    // SAFETY: the loader returns null or a string of C, which is valid until its next call on this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { "unknown error".to_owned() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

/// Why the plug-in does not serve the ggml of this process, if so.
fn refusal(plugin: Library) -> Result<Option<String>, String> {
    // SAFETY: the handle is open, and the name is a string of C.
    let function = unsafe { libc::dlsym(plugin.0, c"ggml_fanout_refusal".as_ptr()) };
    if function.is_null() {
        return Err(loader_error());
    }
    // SAFETY: the plug-in's function of this name takes nothing, and returns null or a string of C that is never freed.
    unsafe {
        let refusal = std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(function);
        let reason = refusal();
        Ok((!reason.is_null()).then(|| CStr::from_ptr(reason).to_string_lossy().into_owned()))
    }
}
