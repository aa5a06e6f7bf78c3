//! Facts of the machine and of the build, which every result carries: figures of two machines do not compare.

use std::process::Command;

use serde_json::{Value, json};

/// The machine: processor, memory, kernel, compiler, and what else it was doing.
pub fn machine() -> Value {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: Vec<f64> = load.split(' ').take(3).filter_map(|part| part.parse().ok()).collect();
    json!({
        "cpu": field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_bytes": field("/proc/meminfo", "MemTotal")
            .and_then(|text| text.split(' ').next()?.parse::<u64>().ok())
            .map_or(0, |kib| kib * 1024),
        "kernel": output("uname", &["-sr"]),
        "rustc": output("rustc", &["--version"]),
        "load_average_before": load,
    })
}

/// The code: commit and profile.
pub fn build() -> Value {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let changed =
        output("git", &["-C", root, "status", "--porcelain", "--", "crates/index", "crates/blocks", "perf/index"]);
    json!({
        "commit": output("git", &["-C", root, "rev-parse", "HEAD"]),
        "uncommitted_changes": !changed.is_empty(),
        "profile": if cfg!(debug_assertions) { "dev" } else { "release" },
    })
}

/// Resident bytes of this process.
pub fn resident_bytes() -> u64 {
    let kib = field("/proc/self/status", "VmRSS").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Seconds of CPU time of all threads of this process.
pub fn cpu_seconds() -> f64 {
    let usage = usage(libc::RUSAGE_SELF);
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// How often the kernel has taken the core from this thread, which waits that the thread asked for are not.
pub fn preemptions() -> i64 {
    usage(libc::RUSAGE_THREAD).ru_nivcsw
}

fn usage(of: libc::c_int) -> libc::rusage {
    let mut usage = std::mem::MaybeUninit::zeroed();
    // SAFETY: the call fills the structure, all of whose bit patterns are valid, and keeps no pointer to it.
    unsafe {
        libc::getrusage(of, usage.as_mut_ptr());
        usage.assume_init()
    }
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or_else(|_| "unknown".to_owned(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
