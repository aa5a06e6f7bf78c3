//! Where a Python engine puts embeddings.

use kvist_errors::KvistError;
use kvist_proto::engine::v1::EmbedResponse;
use kvist_worker::EmbedSink;
use parking_lot::Mutex;
use prost::Message as _;
use pyo3::prelude::*;

use crate::failure::{error_of, raise_invalid};

/// Where the embeddings of one call go. Dropped before its end, the call fails.
#[pyclass(frozen, name = "EmbedSink", module = "kvist._core")]
pub(crate) struct EmbedAnswer {
    /// None once it has ended.
    inner: Mutex<Option<EmbedSink>>,
}

impl EmbedAnswer {
    pub(crate) fn new(sink: EmbedSink) -> Self {
        Self { inner: Mutex::new(Some(sink)) }
    }

    pub(crate) fn fail(&self, error: KvistError) {
        if let Some(sink) = self.inner.lock().take() {
            sink.failed(error);
        }
    }
}

#[pymethods]
impl EmbedAnswer {
    /// The embeddings: an encoded `kvist.engine.v1.EmbedResponse`, one for each input in order.
    fn finished(&self, py: Python<'_>, response: &[u8]) -> PyResult<()> {
        py.detach(|| {
            let response = EmbedResponse::decode(response).map_err(|error| raise_invalid("response", error))?;
            if let Some(sink) = self.inner.lock().take() {
                sink.finished(response);
            }
            Ok(())
        })
    }

    /// The call failed, with a code of the catalogue and a public text.
    #[pyo3(signature = (code, message, not_started=false, retry_after_ms=None, fields=Vec::new()))]
    fn failed(
        &self,
        code: &str,
        message: &str,
        not_started: bool,
        retry_after_ms: Option<u64>,
        fields: Vec<(String, String)>,
    ) -> PyResult<()> {
        self.fail(error_of(code, message, not_started, retry_after_ms, fields)?);
        Ok(())
    }

    /// Whether nobody waits for the embeddings any more.
    fn is_abandoned(&self) -> bool {
        self.inner.lock().as_ref().is_none_or(EmbedSink::is_abandoned)
    }
}
