//! The text that `--help` prints below the options.

/// Exit statuses and examples, printed below the options.
pub(crate) const AFTER_HELP: &str = "\
Exit status:
  0    ended by SIGTERM or SIGINT, or without --allow-keys by SIGHUP; --status: the server accepts clients
  1    cannot serve: address in use, no such GPU, folder not usable; the worker died while it drained, or had to be
       killed 15 s after the time of --drain; --status: the server accepts no clients
  2    wrong arguments
  75   a device is lost, and only a new process can use it again: an uncorrectable memory error, an illegal access, a GPU
       that fell off the bus or hangs. The server has served what other devices run for up to 10 s. With a supervisor, this
       is the exit code of the worker, which is replaced
  128 + N
       ended by a second signal N, or the worker was killed by signal N before it served
A worker that has served and then ends in any way is replaced. If ten in a row cannot serve, the program ends with the
status of the last one, or 1 if that is 0.

Examples:
  rpc-server                          serve all GPUs, or the CPU if there is no GPU, on port 50052,
                                      for clients on this machine only
  rpc-server -d 0,0,CPU --mem 20G,10G,32G
                                      one GPU as two devices, of 20 and 10 GiB, and the CPU
  CUDA_VISIBLE_DEVICES=2,3 rpc-server only these GPUs, here as CUDA0 and CUDA1
  rpc-server -H 10.0.0.5 --allow 10.0.0.0/24 --peer 10.0.0.6
                                      serve the clients of that network without keys, exchange tensors directly
                                      with the server on 10.0.0.6
  rpc-server -H 10.0.0.5 --key server.key --allow-keys clients
                                      serve the clients whose keys are in that list, over TLS
  rpc-server --listen 50052=8 --listen 50053=7
                                      one port for clients of protocol 8.0, one for those of 7.0
  rpc-server limits >limits.toml      then change it, and start the server with --limits limits.toml
  rpc-server --status 10.0.0.5        print the state of that server
  rpc-server doctor 10.0.0.5          check this machine and that server, and say what mends what is wrong
  RUST_LOG=fanout=debug rpc-server    log more

  llama-cli -m model.gguf -ngl 99 --rpc 127.0.0.1:50052

Without keys, anyone who can reach the port, or whom --allow names, can use the devices; anyone on the network path can read
what is sent.";
