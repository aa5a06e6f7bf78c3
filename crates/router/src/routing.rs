//! How requests are let in and targets chosen, as settings.

use kvist_schedule::{AdmissionConfig, ConfigError, Pipeline, PipelineConfig};
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
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        Ok(Self { pipeline: PipelineConfig::from_value(value).and_then(Pipeline::new)? })
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

/// Who may start at once; everybody by default.
#[derive(Clone, Debug, Default)]
pub struct AdmissionSettings {
    /// For each model by itself.
    pub config: AdmissionConfig,
}

impl AdmissionSettings {
    /// Reads `"allow_all"` or `{concurrency: {...}}`.
    ///
    /// # Errors
    /// Says what is wrong, and what would be valid.
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        Ok(Self { config: AdmissionConfig::from_value(value)? })
    }
}

impl<'de> Deserialize<'de> for AdmissionSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_value(&Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}
