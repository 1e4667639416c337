//! llama.cpp's own RPC server of protocol 8.0.1, with the CPU as its device.

use std::process::ExitCode;

use interop8::{Args, Error, init_log, run_rpc_server};

const USAGE: &str = "\
Usage: llama8-server --port PORT [--host HOST] [--threads N]

llama.cpp's own RPC server, protocol 8.0.1, with the CPU as its only device. It serves one client at a time, on the loopback
interface only.

  --port PORT   port to listen on
  --host HOST   address to listen on (default 127.0.0.1)
  --threads N   threads of the CPU device (default 1)
  --verbose     print what llama.cpp calls information too
";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("llama8-server: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let args = Args::from_env(USAGE, &["--port", "--host", "--threads"], &["--verbose"]);
    init_log(args.has("--verbose"));
    args.required("--port")?;
    let port: u16 = args.number("--port", 0)?;
    if port == 0 {
        return Err(Error::new("--port: llama.cpp does not tell which port the system chose, so 0 is of no use"));
    }
    run_rpc_server(&format!("{}:{port}", args.text("--host").unwrap_or("127.0.0.1")), args.number("--threads", 1)?)
}
