//! Texts of models, loaded once for each digest, and the bounded pool that renders and tokenizes.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Weak},
};

use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::TokenizerHeader;
use kvist_text::{ModelText, TextError, TextHeader, digest_hex};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::generate::Prompt;

/// Prompts with less text are tokenized where they arrive: below it, a hop to another thread costs more than the work,
/// and a thread of its own has its caches to fill.
const INLINE_TEXT_BYTES: usize = 4 * 1024;

/// The same where the fast tokenizer is used, which takes less than a millisecond for this.
const FAST_INLINE_TEXT_BYTES: usize = 32 * 1024;

/// Threads for the processor's work, so that a slow tokenizer or a hostile prompt never stalls streams.
#[derive(Debug)]
pub(crate) struct TextPool {
    permits: Semaphore,
}

impl TextPool {
    pub(crate) fn new(threads: usize) -> Self {
        let processors = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let threads = if threads == 0 { processors.div_ceil(2) } else { threads };
        Self { permits: Semaphore::new(threads) }
    }

    /// Runs work on a thread of its own, when one of the pool is free.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, KvistError> {
        let stopped = || KvistError::new(Code::Draining, "the router is being stopped");
        let _permit = self.permits.acquire().await.map_err(|_| stopped())?;
        tokio::task::spawn_blocking(work).await.map_err(|error| {
            if error.is_panic() {
                KvistError::new(Code::Internal, "the tokenizer failed on this prompt")
            } else {
                stopped()
            }
        })
    }

    /// Renders and tokenizes a prompt of a cache salt.
    pub(crate) async fn encode(
        &self,
        text: Option<Arc<ModelText>>,
        prompt: Prompt,
        cache_salt: &str,
    ) -> Result<Vec<u32>, KvistError> {
        if let Prompt::Tokens(ids) = prompt {
            return check_tokens(text.as_deref(), ids);
        }
        let text = text.ok_or_else(|| {
            KvistError::field(
                Code::UnsupportedField,
                "prompt",
                "the engines of this model have no tokenizer; send token ids",
            )
        })?;
        let inline_bytes = if text.is_fast() { FAST_INLINE_TEXT_BYTES } else { INLINE_TEXT_BYTES };
        if prompt.text_bytes() < inline_bytes {
            return encode_now(&text, &prompt, cache_salt);
        }
        let cache_salt = cache_salt.to_owned();
        self.run(move || encode_now(&text, &prompt, &cache_salt)).await?
    }
}

fn check_tokens(text: Option<&ModelText>, ids: Vec<u32>) -> Result<Vec<u32>, KvistError> {
    if let Some(text) = text
        && let Some(position) = ids.iter().position(|id| *id as usize >= text.vocabulary_size())
    {
        return Err(KvistError::field(
            Code::InvalidArgument,
            format!("prompt[{position}]"),
            format!("is no token of the model; its vocabulary has {}", text.vocabulary_size()),
        ));
    }
    Ok(ids)
}

fn encode_now(text: &ModelText, prompt: &Prompt, cache_salt: &str) -> Result<Vec<u32>, KvistError> {
    match prompt {
        Prompt::Text(plain) => text.encode_prompt(plain),
        Prompt::Chat(chat) => text.encode_chat(chat, cache_salt),
        Prompt::Tokens(ids) => Ok(ids.clone()),
    }
    .map_err(|error| match error {
        TextError::Render(why) => {
            KvistError::new(Code::TemplateFailed, format!("the chat template refused the conversation: {why}"))
        }
        TextError::NoTemplate => {
            KvistError::field(Code::UnsupportedField, "messages", "the model has no chat template; use a plain prompt")
        }
        other => KvistError::new(Code::Internal, other.to_string()),
    })
}

/// One entry of the cache; held while it loads, so that a digest is loaded once.
type Cell = Arc<tokio::sync::Mutex<Weak<ModelText>>>;

/// Texts that stay loaded although nobody uses them, so that a worker that restarts finds its text.
const KEPT_TEXTS: usize = 4;

/// Texts by digest of tokenizer and template; kept as long as somebody uses them, the last few longer.
#[derive(Debug, Default)]
pub(crate) struct TextCache {
    kept: Mutex<VecDeque<Arc<ModelText>>>,
    cells: Mutex<HashMap<String, Cell>>,
}

impl TextCache {
    /// The text of a digest: from the cache, or fetched and loaded off the request's path.
    pub(crate) async fn get<F>(
        &self,
        pool: &TextPool,
        key: String,
        fetch: impl FnOnce() -> F,
    ) -> Result<Arc<ModelText>, KvistError>
    where
        F: Future<Output = Result<(TokenizerHeader, Vec<u8>), KvistError>>,
    {
        let cell = {
            let mut cells = self.cells.lock();
            // What nobody uses and nobody loads is forgotten.
            cells.retain(|_, cell| {
                Arc::strong_count(cell) > 1 || cell.try_lock().map_or(true, |weak| weak.strong_count() > 0)
            });
            Arc::clone(cells.entry(key).or_default())
        };
        let mut weak = cell.lock().await;
        if let Some(text) = weak.upgrade() {
            return Ok(text);
        }
        let (header, file) = fetch().await?;
        let text = pool
            .run(move || {
                if digest_hex(&file) != header.digest {
                    return Err(KvistError::new(Code::Internal, "the tokenizer file does not have its stated digest"));
                }
                let header = TextHeader {
                    chat_template: header.chat_template,
                    bos_token: header.bos_token,
                    eos_token: header.eos_token,
                    add_bos: header.add_bos,
                    eos_token_ids: header.eos_token_ids,
                };
                ModelText::load(&file, header).map_err(|error| KvistError::new(Code::Internal, error.to_string()))
            })
            .await??;
        let text = Arc::new(text);
        *weak = Arc::downgrade(&text);
        let mut kept = self.kept.lock();
        kept.push_back(Arc::clone(&text));
        if kept.len() > KEPT_TEXTS {
            kept.pop_front();
        }
        Ok(text)
    }
}
