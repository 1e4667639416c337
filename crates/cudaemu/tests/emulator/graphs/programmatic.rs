//! Programmatic edges: their data is checked, and a kernel behind one is checked for its wait.

use super::support::{Data, address, connect_function, context, emulator, floats, ok, read};
use crate::driver::support::add_node;
use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::Ptx;
use std::ptr::null_mut;

const PROGRAMMATIC: Data = [1, 0, 1, 0, 0, 0, 0, 0];

/// `twice` doubles a float and waits for the grids before; `fast` does not wait.
const PTX: &str = "
.version 7.8
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 data)
{griddepcontrol.launch_dependents;griddepcontrol.wait;
    .reg .f32 %f;
    .reg .b64 %rd;
    ld.param.u64 %rd, [data];
    ld.global.f32 %f, [%rd];
    add.f32 %f, %f, %f;
    st.global.f32 [%rd], %f;
    ret;
}
.visible .entry fast(.param .u64 data)
{
    griddepcontrol.launch_dependents;
    ret;
}
";

#[test]
fn programmatic_edges_need_kernels_that_wait() {
    let emulator = emulator("CUDAEMU_CAPABILITY=9.0");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let module = context.load_module(Ptx::from_src(PTX)).unwrap();
        let data = stream.clone_htod(&floats(2)[1..]).unwrap();
        let address = address(&data, &stream);
        let connect = connect_function();
        let kernels = ["twice", "fast"].map(|name| module.load_function(name).unwrap());
        for (kernel, want, report) in [(&kernels[0], 8.0, false), (&kernels[1], 32.0, true)] {
            let mut graph = null_mut();
            let mut nodes = [null_mut(); 3];
            // SAFETY: all structures are complete, and live during the calls.
            unsafe {
                ok(sys::cuGraphCreate(&mut graph, 0));
                for (node, kernel) in nodes.iter_mut().zip([&kernels[0], &kernels[0], kernel]) {
                    *node = add_node(graph, kernel.cu_function(), 1, &[address], &[]);
                }
                // Nothing is added if one edge is not valid.
                for wrong in [[0, 0, 1, 0, 0, 0, 0, 0], [3, 0, 1, 0, 0, 0, 0, 0], [1; 8], [1, 0, 0, 0, 0, 0, 0, 0]] {
                    let added = connect(graph, nodes.as_ptr(), nodes[1..].as_ptr(), [PROGRAMMATIC, wrong].as_ptr(), 2);
                    assert_eq!(added, CUresult::CUDA_ERROR_INVALID_VALUE, "{wrong:?}");
                }
                ok(connect(graph, nodes.as_ptr(), nodes[1..].as_ptr(), [PROGRAMMATIC; 2].as_ptr(), 2));
                let exec = super::instantiate(graph);
                let launches = emulator.programmatic_launches();
                ok(sys::cuGraphLaunch(exec, stream.cu_stream()));
                assert_eq!(emulator.programmatic_launches() - launches, 2);
                ok(sys::cuGraphDestroy(graph));
                assert_eq!(read(&stream, &data), [want]);
                ok(sys::cuGraphExecDestroy(exec));
            }
            let reports = emulator.reports();
            assert_eq!(reports.iter().any(|text| text.contains("kernel fast has a programmatic dependency")), report);
        }
    }
}

#[test]
fn programmatic_edges_are_refused_if_the_settings_say_so() {
    let _emulator = emulator("CUDAEMU_CAPABILITY=9.0\nCUDAEMU_PROGRAMMATIC_EDGES=off");
    let context = context(0);
    let module = context.load_module(Ptx::from_src(PTX)).unwrap();
    let kernel = module.load_function("twice").unwrap();
    let connect = connect_function();
    let (mut graph, mut nodes) = (null_mut(), [null_mut(); 2]);
    // SAFETY: all structures are complete, and live during the calls. Nothing is launched.
    unsafe {
        ok(sys::cuGraphCreate(&mut graph, 0));
        for node in &mut nodes {
            *node = add_node(graph, kernel.cu_function(), 1, &[0], &[]);
        }
        let add = |data: Data| connect(graph, &nodes[0], &nodes[1], &data, 1);
        assert_eq!(add(PROGRAMMATIC), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        ok(add([0; 8]));
        ok(sys::cuGraphDestroy(graph));
    }
}
