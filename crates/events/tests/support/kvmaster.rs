//! A KV master with the index of a real feed: `Bootstrap`, and nothing else.

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use futures::{Stream, StreamExt as _};
use kvist_events::Bootstraps;
use kvist_index::Index;
use kvist_proto::kvmaster::v1::{
    kv_master_service_server::{KvMasterService, KvMasterServiceServer},
    *,
};
use tokio::{net::TcpListener, sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A KV master of the script.
pub(crate) struct ScriptedKvMaster {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl ScriptedKvMaster {
    /// Serves an index; `most_parts` cuts each answer short.
    pub(crate) async fn start(index: Arc<Index>, most_parts: Option<usize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = KvMasterServiceServer::new(Service { bootstraps: Bootstraps::new(index), most_parts });
        let server = tonic::transport::Server::builder().add_service(service);
        let server = tokio::spawn(async move {
            server.serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))).await.unwrap();
        });
        Self { address, server }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }
}

impl Drop for ScriptedKvMaster {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Service {
    bootstraps: Arc<Bootstraps>,
    most_parts: Option<usize>,
}

#[tonic::async_trait]
impl KvMasterService for Service {
    type BootstrapStream = BoxStream<BootstrapResponse>;
    type WatchSourcesStream = BoxStream<WatchSourcesResponse>;

    async fn bootstrap(&self, request: Request<BootstrapRequest>) -> Result<Response<Self::BootstrapStream>, Status> {
        let answer = self.bootstraps.answer(&request.into_inner().worker_uids);
        let parts = answer.flat_map(|parts| parts.to_vec()).take(self.most_parts.unwrap_or(usize::MAX));
        let (sender, receiver) = mpsc::channel(16);
        // Walking an index is nothing for the threads that serve everybody.
        tokio::task::spawn_blocking(move || parts.map(Ok).try_for_each(|part| sender.blocking_send(part)));
        Ok(Response::new(ReceiverStream::new(receiver).boxed()))
    }

    async fn lookup(&self, _: Request<LookupRequest>) -> Result<Response<LookupResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn watch_sources(
        &self,
        _: Request<WatchSourcesRequest>,
    ) -> Result<Response<Self::WatchSourcesStream>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn put_prefix(&self, _: Request<PutPrefixRequest>) -> Result<Response<PutPrefixResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn list_prefixes(&self, _: Request<ListPrefixesRequest>) -> Result<Response<ListPrefixesResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }

    async fn delete_prefix(&self, _: Request<DeletePrefixRequest>) -> Result<Response<DeletePrefixResponse>, Status> {
        Err(Status::unimplemented("not in the script"))
    }
}
