//! A NATS server of our own.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

static NEXT_DIRECTORY: AtomicU32 = AtomicU32::new(0);

/// A server process; it ends with the value.
pub(crate) struct NatsServer {
    program: PathBuf,
    directory: PathBuf,
    port: u16,
    child: Option<Child>,
}

impl NatsServer {
    /// Starts a server on a free port. None, with the reason printed, where there is no program.
    pub(crate) fn start() -> Option<Self> {
        let Some(program) = find_program() else {
            println!("skipped: no nats-server in KVIST_NATS_SERVER, on PATH or in .venv/bin");
            return None;
        };
        let number = NEXT_DIRECTORY.fetch_add(1, Ordering::Relaxed);
        let directory = env::temp_dir().join(format!("kvist-events-test-{}-{number}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let mut server = Self { program, directory, port: 0, child: None };
        server.run("-1");
        Some(server)
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Ends the process without a farewell.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Starts it again where it was.
    pub(crate) fn start_again(&mut self) {
        let port = self.port.to_string();
        self.run(&port);
    }

    fn run(&mut self, port: &str) {
        for old in ports_files(&self.directory) {
            fs::remove_file(old).unwrap();
        }
        let child = Command::new(&self.program)
            .args(["--addr", "127.0.0.1", "--port", port, "--ports_file_dir"])
            .arg(&self.directory)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.child = Some(child);
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(port) = ports_files(&self.directory).first().and_then(|file| read_port(file)) {
                self.port = port;
                return;
            }
            assert!(Instant::now() < deadline, "nats-server does not say its port");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn ports_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "ports")).collect()
}

fn read_port(file: &Path) -> Option<u16> {
    let ports: serde_json::Value = serde_json::from_str(&fs::read_to_string(file).ok()?).ok()?;
    ports["nats"][0].as_str()?.rsplit_once(':')?.1.parse().ok()
}

fn find_program() -> Option<PathBuf> {
    if let Some(program) = env::var_os("KVIST_NATS_SERVER") {
        return Some(program.into());
    }
    let on_path = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let virtual_environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin");
    on_path
        .into_iter()
        .chain([virtual_environment])
        .map(|folder| folder.join("nats-server"))
        .find(|file| file.is_file())
}
