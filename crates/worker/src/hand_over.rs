//! How a worker is told to hand KV over, and what its machine must have for it.

use std::{path::Path, time::Duration};

use kvist_errors::{Code, KvistError};
use serde::Deserialize;

/// What carries KV between engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferProtocol {
    /// Remote direct memory access. Never replaced by TCP.
    #[default]
    Rdma,
    /// TCP, through the memory of the hosts.
    Tcp,
}

/// What a decode engine does when KV does not arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferFailurePolicy {
    /// It computes the prompt itself.
    #[default]
    Recompute,
    /// The request fails with `KV_TRANSFER_FAILED`.
    Fail,
}

/// How KV is handed over.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HandOverSettings {
    /// The connector, such as `NixlConnector`; `sim` for the simulated engine.
    pub connector: String,
    /// What carries the KV; absent where the connector goes through files.
    pub protocol: Option<TransferProtocol>,
    /// Folder that all engines of the model share, for connectors that go through files.
    pub shared_folder: String,
    /// Device of the RDMA network, such as `mlx5_0`; empty for any.
    pub rdma_device: String,
    /// Milliseconds for which a prefill engine keeps blocks for a decode engine that does not come.
    pub lease_ms: u64,
    /// What a decode engine does when the KV does not arrive.
    pub on_failure: TransferFailurePolicy,
}

impl Default for HandOverSettings {
    fn default() -> Self {
        Self {
            connector: "sim".to_owned(),
            protocol: None,
            shared_folder: String::new(),
            rdma_device: String::new(),
            lease_ms: 30_000,
            on_failure: TransferFailurePolicy::default(),
        }
    }
}

impl HandOverSettings {
    /// How long blocks are kept.
    #[must_use]
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }

    /// Looks for the device that `rdma` needs, before any socket is opened.
    ///
    /// # Errors
    /// `PRECONDITION_FAILED` when the machine has none.
    pub fn check(&self, devices: &Path) -> Result<(), KvistError> {
        if self.protocol != Some(TransferProtocol::Rdma) {
            return Ok(());
        }
        let present: Vec<String> = std::fs::read_dir(devices)
            .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
            .unwrap_or_default();
        let is_there =
            if self.rdma_device.is_empty() { !present.is_empty() } else { present.contains(&self.rdma_device) };
        if is_there {
            return Ok(());
        }
        let wanted = if self.rdma_device.is_empty() { "an RDMA device" } else { &self.rdma_device };
        let found = if present.is_empty() { "none".to_owned() } else { present.join(", ") };
        let message = format!(
            "hand-over by rdma needs {wanted} in {}, and there is {found}; TCP is used only where `protocol: tcp` is \
             written",
            devices.display()
        );
        Err(KvistError::new(Code::PreconditionFailed, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(json: &str) -> HandOverSettings {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn rdma_needs_its_device_and_names_it() {
        let folder = std::env::temp_dir().join(format!("kvist-rdma-{}", std::process::id()));
        let any = settings(r#"{"protocol":"rdma"}"#);
        let named = settings(r#"{"protocol":"rdma","rdma_device":"mlx5_3"}"#);
        for (one, wanted) in [(&any, "an RDMA device"), (&named, "mlx5_3")] {
            let error = one.check(&folder).unwrap_err();
            assert_eq!(Code::PreconditionFailed, error.code);
            assert!(error.message.contains(wanted) && error.message.contains("none"), "{}", error.message);
        }
        std::fs::create_dir_all(folder.join("mlx5_0")).unwrap();
        assert!(any.check(&folder).is_ok());
        assert!(named.check(&folder).unwrap_err().message.contains("there is mlx5_0"));
        assert!(settings(r#"{"protocol":"tcp"}"#).check(&folder).is_ok() && settings("{}").check(&folder).is_ok());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
