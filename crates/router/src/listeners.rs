//! What the listeners of a process follow on disk: keys of callers, and certificates.

use std::sync::Arc;

use kvist_doors::Door;
use kvist_telemetry::{Metrics, names};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};

use crate::keys::ApiKeys;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ListenerLabel {
    listener: &'static str,
}

/// The listeners of one process.
#[derive(Debug)]
pub struct Listeners {
    keys: Arc<ApiKeys>,
    doors: Vec<(&'static str, Arc<Door>)>,
    certificate_expiry: Family<ListenerLabel, Gauge>,
}

impl Listeners {
    /// * `doors`: By the name of their listener.
    #[must_use]
    pub fn new(metrics: &Metrics, keys: Arc<ApiKeys>, doors: Vec<(&'static str, Arc<Door>)>) -> Self {
        let certificate_expiry = metrics.register(
            names::TLS_CERTIFICATE_EXPIRY,
            "When the certificate of a listener ends, in Unix seconds.",
            Family::default(),
        );
        Self { keys, doors, certificate_expiry }
    }

    /// Reads keys again when their file has changed, and says when certificates end. To be called about once a second.
    pub fn look_after(&self) {
        match self.keys.reload_if_changed() {
            Ok(false) => {}
            Ok(true) => tracing::info!("api_keys_reloaded"),
            Err(error) => tracing::error!(%error, "api_keys_not_reloaded"),
        }
        for (listener, door) in &self.doors {
            if let Some(seconds) = door.certificate_expires_at() {
                self.certificate_expiry.get_or_create(&ListenerLabel { listener }).set(seconds);
            }
        }
    }
}
