//! The engine's own account of its requests, against which tests hold what clients were told.
//!
//! One line of JSON for each request that the engine took, and one for its end. A line is written before anybody hears
//! of what it says, so that a process that is killed has told nothing that its file does not say.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::Path,
};

use kvist_proto::events::v1::SourceId;
use parking_lot::Mutex;
use serde_json::json;

/// A file that one start of one engine writes.
#[derive(Debug)]
pub(super) struct RequestRecord(Mutex<File>);

impl RequestRecord {
    /// Begins `<worker uid>.<incarnation>.jsonl` in a folder, which is made when it is missing.
    pub(super) fn create(folder: &Path, source: &SourceId) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("{}.{}.jsonl", source.worker_uid, source.incarnation));
        Ok(Self(Mutex::new(OpenOptions::new().create(true).append(true).open(path)?)))
    }

    pub(super) fn accepted(&self, request_id: &str) {
        self.write(&json!({"request_id": request_id, "event": "accepted"}));
    }

    /// `reason` is the finish reason, or the code of an error.
    pub(super) fn ended(&self, request_id: &str, reason: &str, completion_tokens: u32) {
        self.write(
            &json!({"request_id": request_id, "event": "ended", "reason": reason, "completion_tokens": completion_tokens}),
        );
    }

    fn write(&self, line: &serde_json::Value) {
        // One write for each line: what the file holds are whole lines, whenever the process is killed.
        if let Err(error) = self.0.lock().write_all(format!("{line}\n").as_bytes()) {
            tracing::error!(%error, "engine_record_not_written");
        }
    }
}
