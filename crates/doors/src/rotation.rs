//! What is made of files, and made anew when they change.

use std::{path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use kvist_errors::KvistError;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;

use crate::files;

/// How often the files are read: seldom enough to cost nothing, soon enough for a certificate that ends in a minute.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// A setting and the file that it names.
pub(crate) type NamedFile = (&'static str, Option<PathBuf>);

/// The contents of the files, in their order. They hold keys: never shown.
type Contents<const FILES: usize> = [Option<Vec<u8>>; FILES];

/// A value that follows its files. Dropping it ends the following.
pub(crate) struct Rotating<T> {
    current: Arc<ArcSwap<T>>,
    _following: AbortOnDropHandle<()>,
}

impl<T> std::fmt::Debug for Rotating<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Rotating").finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Rotating<T> {
    /// Makes the value, and makes it anew whenever the content of a file is another. What cannot be made leaves the last
    /// good value in place and is said once in the log: a certificate and its key are often replaced one after the
    /// other. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// A file cannot be read, or nothing can be made of it.
    pub(crate) fn start<const FILES: usize>(
        files: [NamedFile; FILES],
        make: impl Fn(&Contents<FILES>) -> Result<T, KvistError> + Send + 'static,
    ) -> Result<Self, KvistError> {
        let contents = read(&files)?;
        let current = Arc::new(ArcSwap::from_pointee(make(&contents)?));
        let following = tokio::spawn(follow(files, contents, make, Arc::clone(&current)));
        Ok(Self { current, _following: AbortOnDropHandle::new(following) })
    }

    /// The value for a new connection.
    pub(crate) fn current(&self) -> Arc<T> {
        self.current.load_full()
    }
}

async fn follow<T: Send + Sync + 'static, const FILES: usize>(
    files: [NamedFile; FILES],
    mut taken: Contents<FILES>,
    make: impl Fn(&Contents<FILES>) -> Result<T, KvistError> + Send + 'static,
    current: Arc<ArcSwap<T>>,
) {
    let files = Arc::new(files);
    let mut said = String::new();
    let mut ticks = tokio::time::interval(READ_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let reading = Arc::clone(&files);
        // A file may lie on a network.
        let Ok(contents) = tokio::task::spawn_blocking(move || read(&reading)).await else { return };
        let made = contents.and_then(|contents| {
            if contents == taken {
                return Ok(None);
            }
            make(&contents).map(|value| Some((contents, value)))
        });
        match made {
            Ok(None) => said.clear(),
            Ok(Some((contents, value))) => {
                taken = contents;
                current.store(Arc::new(value));
                said.clear();
                tracing::info!("tls_files_taken");
            }
            Err(error) if error.message != said => {
                tracing::warn!(reason = error.message, "tls_files_refused");
                said = error.message;
            }
            Err(_) => {}
        }
    }
}

fn read<const FILES: usize>(files: &[NamedFile; FILES]) -> Result<Contents<FILES>, KvistError> {
    let mut contents = [const { None }; FILES];
    for (content, (field, path)) in contents.iter_mut().zip(files) {
        if let Some(path) = path {
            *content = Some(files::read(field, path)?);
        }
    }
    Ok(contents)
}
