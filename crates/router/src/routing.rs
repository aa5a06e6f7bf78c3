//! How targets are chosen, as settings.

use kvist_schedule::{Pipeline, PipelineConfig};
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;

/// A pipeline that is ready to decide; Kvist's own by default.
#[derive(Clone, Debug)]
pub struct RoutingSettings {
    /// What chooses.
    pub pipeline: Pipeline,
}

impl RoutingSettings {
    /// Reads `{preset, filters, scorers, picker}`.
    ///
    /// # Errors
    /// Says which name or parameter is wrong, and which are valid.
    pub fn from_value(value: &Value) -> Result<Self, String> {
        let pipeline = PipelineConfig::from_value(value).and_then(Pipeline::new);
        Ok(Self { pipeline: pipeline.map_err(|error| error.to_string())? })
    }
}

impl Default for RoutingSettings {
    fn default() -> Self {
        Self { pipeline: Pipeline::standard() }
    }
}

impl<'de> Deserialize<'de> for RoutingSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_value(&Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}
