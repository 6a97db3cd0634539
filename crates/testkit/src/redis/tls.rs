//! Redis servers with TLS.

use std::ffi::OsString;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use stampede_proof::servers::{Server, run};
use tempfile::TempDir;

use super::{MASTER, client, form_cluster, wait_until};

/// The files of a private certificate authority, with a certificate for servers on 127.0.0.1 and one for clients.
#[derive(Debug)]
pub struct Certificates(TempDir);

impl Certificates {
    pub fn create() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("stampede-certificates-").tempdir()?;
        create(directory.path()).map_err(Error::other)?;
        Ok(Self(directory))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The certificate of the authority.
    pub fn ca(&self) -> PathBuf {
        self.file("ca.pem")
    }

    pub fn server_certificate(&self) -> PathBuf {
        self.file("server.pem")
    }

    pub fn server_key(&self) -> PathBuf {
        self.file("server.key")
    }

    pub fn client_certificate(&self) -> PathBuf {
        self.file("client.pem")
    }

    pub fn client_key(&self) -> PathBuf {
        self.file("client.key")
    }

    /// Options with which `redis-cli` uses TLS and the client's certificate.
    fn cli_options(&self) -> Vec<OsString> {
        let files = [("--cacert", self.ca()), ("--cert", self.client_certificate()), ("--key", self.client_key())];
        let files = files.into_iter().flat_map(|(option, file)| [option.into(), file.into()]);
        std::iter::once("--tls".into()).chain(files).collect()
    }

    /// Runs a command with `redis-cli` and returns its output.
    pub fn ask(&self, port: u16, command: &[&str]) -> Result<String> {
        run(client(port).args(self.cli_options()).args(command))
    }

    /// A server that accepts only TLS. `tls-auth-clients` says whether clients need a certificate: `yes`, `no` or `optional`.
    pub fn start(&self, tls_auth_clients: &str) -> Result<Server> {
        self.launch(&["--tls-auth-clients", tls_auth_clients, "--save", "", "--appendonly", "no"])
    }

    /// A cluster of three masters that accept only TLS.
    pub fn start_cluster(&self) -> Result<[Server; 3]> {
        let node = || {
            self.launch(&["--tls-cluster", "yes", "--tls-auth-clients", "no", "--cluster-enabled", "yes", "--save", ""])
        };
        let nodes = [node()?, node()?, node()?];
        form_cluster(&nodes, 0, &self.cli_options())?;
        Ok(nodes)
    }

    /// A master and a sentinel that accept only TLS.
    pub fn start_with_sentinel(&self) -> Result<[Server; 2]> {
        let master = self.start("no")?;
        let monitor = format!("sentinel monitor {MASTER} 127.0.0.1 {} 1\n", master.port());
        let prepare = |directory: &Path| std::fs::write(directory.join("sentinel.conf"), monitor);
        let options = ["--sentinel", "--tls-replication", "yes", "--tls-auth-clients", "no"];
        let sentinel = self.launch_with(prepare, &["sentinel.conf"], &options)?;
        wait_until("the sentinel has found the master", || {
            Ok(self.ask(sentinel.port(), &["sentinel", "master", MASTER])?.contains("role-reported\nmaster"))
        })?;
        Ok([master, sentinel])
    }

    fn launch(&self, options: &[&str]) -> Result<Server> {
        self.launch_with(|_| Ok(()), &[], options)
    }

    fn launch_with(
        &self,
        prepare: impl FnOnce(&Path) -> Result<()>,
        config: &[&str],
        options: &[&str],
    ) -> Result<Server> {
        let owned = |args: &[&str]| args.iter().map(|&arg| arg.to_owned()).collect::<Vec<String>>();
        let (config, options, directory) = (owned(config), owned(options), self.0.path().to_owned());
        let start = move |data: &Path, port: u16| {
            let mut command = Command::new("redis-server");
            command.args(config.iter().map(|name| data.join(name)));
            command.args(["--bind", "127.0.0.1", "--port", "0", "--tls-port", &port.to_string()]);
            for (option, file) in
                [("--tls-ca-cert-file", "ca.pem"), ("--tls-cert-file", "server.pem"), ("--tls-key-file", "server.key")]
            {
                command.arg(option).arg(directory.join(file));
            }
            command.arg("--dir").arg(data).args(&options);
            command
        };
        let cli_options = self.cli_options();
        let ready = move |port: u16| {
            let mut command = client(port);
            command.args(&cli_options).arg("ping");
            command
        };
        Server::launch("Redis with TLS", prepare, start, ready)
    }
}

pub fn url(port: u16) -> String {
    format!("rediss://127.0.0.1:{port}/")
}

fn create(directory: &Path) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "authority");
    let key = KeyPair::generate()?;
    std::fs::write(directory.join("ca.pem"), params.self_signed(&key)?.pem())?;
    let authority = Issuer::new(params, key);
    for (name, addresses) in [("server", vec!["127.0.0.1".to_owned()]), ("client", Vec::new())] {
        let mut params = CertificateParams::new(addresses)?;
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate()?;
        std::fs::write(directory.join(format!("{name}.pem")), params.signed_by(&key, &authority)?.pem())?;
        std::fs::write(directory.join(format!("{name}.key")), key.serialize_pem())?;
    }
    Ok(())
}
