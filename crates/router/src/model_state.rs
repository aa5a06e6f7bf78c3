//! What a router keeps of a model from one cluster state to the next.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use arc_swap::ArcSwap;
use kvist_proto::controller::v1::Model;
use kvist_schedule::Pipeline;

use crate::{
    door::Door,
    health::Health,
    metrics::{ModelLabel, RouterMetrics},
    policy::Policy,
    select::Selector,
    target::WorkerNode,
};

/// Its policy, its door, and how its targets are.
#[derive(Debug)]
pub(crate) struct ModelState {
    policy: ArcSwap<Policy>,
    has_refused: AtomicBool,
    pub(crate) door: Arc<Door>,
    pub(crate) health: Health,
}

/// What models get that are new.
#[derive(Debug)]
pub(crate) struct ModelStates {
    pub(crate) defaults: Policy,
    pub(crate) selector: Arc<Selector>,
    pub(crate) metrics: RouterMetrics,
}

impl ModelStates {
    /// The state of a model that may have been there before, with its resource as it was then.
    pub(crate) fn next(
        &self,
        before: Option<(&Model, &Arc<ModelState>)>,
        model: &Model,
        workers: &[Arc<WorkerNode>],
    ) -> Arc<ModelState> {
        // Another resource of the same name is another model.
        let before = before.filter(|(known, _)| known.uid == model.uid && known.name == model.name);
        let state = match before {
            Some((known, state)) => {
                // What is written is read once.
                if known.routing != model.routing || known.admission != model.admission {
                    let (policy, has_refused) = Policy::of_model(model, &self.defaults, Some(&state.policy.load()));
                    state.has_refused.store(has_refused, Ordering::Relaxed);
                    tracing::info!(
                        model = %model.name,
                        policy = policy.pipeline.summary(),
                        admission = ?policy.admission,
                        "model_policy_changed"
                    );
                    state.policy.store(Arc::new(policy));
                }
                Arc::clone(state)
            }
            None => {
                let (policy, has_refused) = Policy::of_model(model, &self.defaults, None);
                let label = ModelLabel { model: model.name.clone() };
                Arc::new(ModelState {
                    door: Arc::new(Door::new(
                        model.name.as_str().into(),
                        policy.admission.clone(),
                        Arc::clone(&self.selector),
                        self.metrics.clone(),
                    )),
                    health: Health::new(self.metrics.breaker_openings.get_or_create(&label).clone()),
                    policy: ArcSwap::from_pointee(policy),
                    has_refused: has_refused.into(),
                })
            }
        };
        let of_node = |node: &Arc<WorkerNode>| -> Vec<_> {
            (0..node.ranks()).map(|rank| (node.target_id(rank), node.incarnation)).collect()
        };
        state.health.follow(workers.iter().flat_map(of_node).collect());
        state.door.follow(&state.policy.load(), workers.to_vec());
        state
    }
}

impl ModelState {
    /// What chooses at this moment.
    pub(crate) fn pipeline(&self) -> Arc<Pipeline> {
        Arc::clone(&self.policy.load().pipeline)
    }

    /// Whether its resource says what this router does not understand.
    pub(crate) fn has_refused(&self) -> bool {
        self.has_refused.load(Ordering::Relaxed)
    }
}
