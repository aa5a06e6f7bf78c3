//! By what the requests of a model are let in and placed: the router's own words, or those of the model's resource.

use std::sync::Arc;

use kvist_proto::controller::v1::Model;
use kvist_schedule::{AdmissionConfig, ConfigError, Pipeline, PipelineConfig};

use crate::{
    convert::{to_json, value_to_json},
    settings::RouterSettings,
};

/// What holds for one model.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) admission: AdmissionConfig,
}

impl Policy {
    /// What holds for models that say nothing themselves.
    pub(crate) fn of_router(settings: &RouterSettings) -> Self {
        Self { pipeline: Arc::new(settings.routing.pipeline.clone()), admission: settings.admission.config.clone() }
    }

    /// What holds for a model: what it says, what the router says where it says nothing, and what held before where it
    /// says what this router does not understand. With it comes whether that was so.
    pub(crate) fn of_model(model: &Model, defaults: &Self, before: Option<&Self>) -> (Self, bool) {
        let last_good = before.unwrap_or(defaults);
        let mut has_refused = false;
        let mut refuse = |field: &str, error: &ConfigError| {
            has_refused = true;
            let path = if error.path().is_empty() { field.to_owned() } else { format!("{field}.{}", error.path()) };
            tracing::error!(model = %model.name, field = path, reason = %error, "model_policy_refused");
        };
        let pipeline = match &model.routing {
            None => Arc::clone(&defaults.pipeline),
            Some(routing) => {
                let written = to_json(routing.clone()).into();
                match PipelineConfig::from_value(&written).and_then(Pipeline::new) {
                    Ok(pipeline) => Arc::new(pipeline),
                    Err(error) => {
                        refuse("routing", &error);
                        Arc::clone(&last_good.pipeline)
                    }
                }
            }
        };
        let admission = match &model.admission {
            None => defaults.admission.clone(),
            Some(admission) => match AdmissionConfig::from_value(&value_to_json(admission.clone())) {
                Ok(admission) => admission,
                Err(error) => {
                    refuse("admission", &error);
                    last_good.admission.clone()
                }
            },
        };
        (Self { pipeline, admission }, has_refused)
    }
}

#[cfg(test)]
mod tests {
    use prost_types::{Struct, Value, value::Kind};

    use super::*;

    fn text(text: &str) -> Value {
        Value { kind: Some(Kind::StringValue(text.to_owned())) }
    }

    fn preset(name: &str) -> Option<Struct> {
        Some(Struct { fields: [("preset".to_owned(), text(name))].into() })
    }

    #[test]
    fn what_is_not_understood_leaves_what_held_before_and_the_rest_counts() {
        let defaults = Policy::of_router(&RouterSettings::default());
        let silent = Policy::of_model(&Model::default(), &defaults, None);
        assert_eq!(("cost, max", false), (silent.0.pipeline.summary(), silent.1));
        let foretoken = Model { routing: preset("foretoken"), ..Model::default() };
        let (before, has_refused) = Policy::of_model(&foretoken, &defaults, Some(&silent.0));
        assert_eq!(("kv_least_loaded, gamble_sampling", false), (before.pipeline.summary(), has_refused));

        let newer = Model { routing: preset("of_tomorrow"), admission: Some(text("allow_all")), ..Model::default() };
        let (kept, has_refused) = Policy::of_model(&newer, &defaults, Some(&before));
        assert_eq!(("kv_least_loaded, gamble_sampling", true), (kept.pipeline.summary(), has_refused));
        let (own, has_refused) = Policy::of_model(&newer, &defaults, None);
        assert_eq!(("cost, max", true), (own.pipeline.summary(), has_refused));

        let limited = AdmissionConfig::from_value(&serde_json::json!({"concurrency": {"maxConcurrentRequests": 2}}));
        let before = Policy { admission: limited.unwrap(), ..before };
        let newer = Model { admission: Some(text("nosuch")), ..Model::default() };
        let (kept, has_refused) = Policy::of_model(&newer, &defaults, Some(&before));
        assert_eq!((&before.admission, "cost, max", true), (&kept.admission, kept.pipeline.summary(), has_refused));
        assert_eq!(
            AdmissionConfig::AllowAll,
            Policy::of_model(&Model::default(), &defaults, Some(&before)).0.admission
        );
    }
}
