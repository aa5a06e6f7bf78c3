//! Incarnations that stay ordered over restarts of the agent.

use std::{
    fs, io,
    io::Write as _,
    path::{Path, PathBuf},
};

use kvist_history::new_incarnation;

/// The last incarnation of an attached engine, on disk.
#[derive(Debug)]
pub(super) struct IncarnationFloor {
    path: PathBuf,
    last: u64,
}

impl IncarnationFloor {
    /// What an earlier agent has left in a folder; a file that cannot be read counts as none, since the clock is a floor
    /// of its own.
    pub(super) fn read(folder: &Path, worker_uid: &str) -> Self {
        let path = folder.join(format!("{worker_uid}.incarnation"));
        let last = match fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().unwrap_or_else(|_| {
                tracing::warn!(path = %path.display(), "incarnation_file_unreadable");
                0
            }),
            Err(_) => 0,
        };
        Self { path, last }
    }

    /// A larger one than every earlier one. It is on disk before anybody hears of it; where that fails, only a clock
    /// that steps back could give it again.
    pub(super) fn next(&mut self) -> u64 {
        self.last = new_incarnation(self.last);
        if let Err(error) = self.write() {
            tracing::error!(path = %self.path.display(), %error, "incarnation_not_written");
        }
        self.last
    }

    fn write(&self) -> io::Result<()> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let temporary = self.path.with_extension("incarnation.new");
        let mut file = fs::File::create(&temporary)?;
        writeln!(file, "{}", self.last)?;
        file.sync_all()?;
        fs::rename(temporary, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incarnations_grow_over_restarts_also_when_the_clock_has_stepped_back() {
        let folder = std::env::temp_dir().join(format!("kvist-floor-{}", std::process::id()));
        let path = folder.join("a-1.incarnation");
        fs::create_dir_all(&folder).unwrap();
        let far = u64::MAX - 10;
        fs::write(&path, far.to_string()).unwrap();
        let mut floor = IncarnationFloor::read(&folder, "a-1");
        assert_eq!((far + 1, far + 2), (floor.next(), floor.next()));
        assert_eq!(far + 3, IncarnationFloor::read(&folder, "a-1").next());
        fs::write(&path, "damaged").unwrap();
        assert!(IncarnationFloor::read(&folder, "a-1").next() > 1_700_000_000_000_000);
        fs::remove_dir_all(folder).unwrap();
    }
}
