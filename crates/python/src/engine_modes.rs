//! What the engines of the core can do, for the reference of engines.

use kvist_attached::{Api, modes};
use kvist_errors::KvistError;
use kvist_proto::engine::v1::{Capabilities, EngineRequest};
use kvist_worker::{Engine as _, HandOverSettings, SimWorkerEngine, SimWorkerSettings, WorkerSettings};
use prost::Message as _;
use pyo3::prelude::*;

use crate::failure::{raise, raise_invalid};

enum Mode {
    Sim,
    SimOfEmbeddings,
    Attached(Api),
}

impl Mode {
    fn named(name: &str) -> PyResult<Self> {
        match name {
            "sim" => Ok(Self::Sim),
            "sim of embeddings" => Ok(Self::SimOfEmbeddings),
            "attached generate" => Ok(Self::Attached(Api::Generate)),
            "attached completions" => Ok(Self::Attached(Api::Completions)),
            _ => {
                Err(raise_invalid("mode", "must be sim, sim of embeddings, attached generate or attached completions"))
            }
        }
    }

    fn is(&self, is_configured: bool) -> Result<(Capabilities, usize), KvistError> {
        match self {
            Self::Sim => of_sim(&sim(is_configured)),
            Self::SimOfEmbeddings => of_sim(&sim_of_embeddings()),
            Self::Attached(api) => Ok((modes::capabilities(*api, is_configured), modes::ranks(is_configured))),
        }
    }
}

fn of_sim(engine: &SimWorkerEngine) -> Result<(Capabilities, usize), KvistError> {
    let description = engine.description()?;
    Ok((description.capabilities, description.ranks as usize))
}

/// A simulated engine, alone or in a pair that hands KV over.
fn sim(is_configured: bool) -> SimWorkerEngine {
    let hand_over = is_configured.then(HandOverSettings::default);
    SimWorkerEngine::of(&WorkerSettings { hand_over, ..WorkerSettings::default() })
}

fn sim_of_embeddings() -> SimWorkerEngine {
    SimWorkerEngine::new(SimWorkerSettings { embedding_dimensions: 1, ..SimWorkerSettings::default() })
}

/// What an engine of the core can do, as an encoded `Capabilities`, and how many ranks its example has: without any
/// configuration, or with all that concerns Kvist.
#[pyfunction]
pub(crate) fn engine_mode(mode: &str, is_configured: bool) -> PyResult<(Vec<u8>, usize)> {
    let (capabilities, ranks) = Mode::named(mode)?.is(is_configured).map_err(|error| raise(&error))?;
    Ok((capabilities.encode_to_vec(), ranks))
}

/// Why an engine of the core does not take an encoded `EngineRequest`; none when it does.
#[pyfunction]
pub(crate) fn engine_refusal(mode: &str, is_configured: bool, request: &[u8]) -> PyResult<Option<String>> {
    let request = EngineRequest::decode(request).map_err(|error| raise_invalid("request", error))?;
    let refusal = match Mode::named(mode)? {
        Mode::Sim => sim(is_configured).check(&request).err(),
        Mode::SimOfEmbeddings => sim_of_embeddings().check(&request).err(),
        Mode::Attached(api) => modes::refusal(request, api, is_configured),
    };
    Ok(refusal.map(|error| error.message))
}
