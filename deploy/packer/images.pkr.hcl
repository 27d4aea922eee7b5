# Two images: troupe-cpu for actors, replay and evaluator, troupe-gpu for the learner. The GPU image has all roles too,
# so that one machine can do everything.

source "amazon-ebs" "cpu" {
  ami_name        = "troupe-cpu-${local.stamp}"
  ami_description = "Troupe: actor, replay, evaluator, learner on the CPU"
  ami_regions     = var.copy_to_regions
  region          = var.region
  instance_type   = var.cpu_build_type
  subnet_id       = var.subnet_id
  encrypt_boot    = true
  kms_key_id      = var.kms_key_id
  imds_support    = "v2.0" # machines of this image have no metadata version 1 unless they ask for it

  source_ami_filter {
    filters = {
      name                = "debian-12-amd64-*"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    owners      = ["136693071363"] # Debian
    most_recent = true
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  launch_block_device_mappings {
    device_name           = "/dev/xvda"
    volume_type           = "gp3"
    throughput            = 125
    iops                  = 3000
    volume_size           = 10
    delete_on_termination = true
  }

  communicator                              = "ssh"
  ssh_username                              = "admin"
  ssh_interface                             = var.instance_profile == "" ? "public_ip" : "session_manager"
  iam_instance_profile                      = var.instance_profile
  temporary_security_group_source_public_ip = var.instance_profile == ""

  tags     = { Project = "troupe", Kind = "cpu", Base = "{{ .SourceAMIName }}" }
  run_tags = { Project = "troupe", Name = "packer-troupe-cpu" }
}

source "amazon-ebs" "gpu" {
  ami_name        = "troupe-gpu-${local.stamp}"
  ami_description = "Troupe: learner on the GPU, and every other role"
  ami_regions     = var.copy_to_regions
  region          = var.region
  instance_type   = var.gpu_build_type
  subnet_id       = var.subnet_id
  encrypt_boot    = true
  kms_key_id      = var.kms_key_id
  imds_support    = "v2.0"

  # AWS's own image with a driver that fits its kernel; torch brings the rest of CUDA.
  source_ami_filter {
    filters = {
      name                = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"
      architecture        = "x86_64"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    owners      = ["amazon"]
    most_recent = true
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_type           = "gp3"
    throughput            = 125
    iops                  = 3000
    volume_size           = 100
    delete_on_termination = true
  }

  communicator                              = "ssh"
  ssh_username                              = "ubuntu"
  ssh_interface                             = var.instance_profile == "" ? "public_ip" : "session_manager"
  iam_instance_profile                      = var.instance_profile
  temporary_security_group_source_public_ip = var.instance_profile == ""

  tags     = { Project = "troupe", Kind = "gpu", Base = "{{ .SourceAMIName }}" }
  run_tags = { Project = "troupe", Name = "packer-troupe-gpu" }
}

build {
  sources = ["source.amazon-ebs.cpu", "source.amazon-ebs.gpu"]

  provisioner "shell-local" {
    # Only what is under version control gets into an image: no run, no key, no state.
    inline = ["git -C ${var.source} archive --format=tar.gz -o ${abspath(path.root)}/source-${source.name}.tar.gz HEAD"]
  }

  provisioner "file" {
    source      = "${abspath(path.root)}/source-${source.name}.tar.gz"
    destination = "/tmp/troupe.tar.gz"
    generated   = true
  }

  provisioner "shell" {
    execute_command  = "sudo env {{ .Vars }} bash -e '{{ .Path }}'"
    environment_vars = ["AWS_REGION=${var.region}", "TORCH_INDEX=${source.name == "cpu" ? var.torch_index : ""}"]
    inline = [
      "cloud-init status --wait >/dev/null || true",
      "mkdir -p /tmp/troupe && tar -xzf /tmp/troupe.tar.gz -C /tmp/troupe",
      "bash /tmp/troupe/deploy/scripts/install.sh ${join(",", concat(["all"], var.extras))} /tmp/troupe",
      "echo packer >/opt/troupe/venv/troupe-image",
      "bash /tmp/troupe/deploy/scripts/install-node.sh /tmp/troupe/deploy/packer/systemd /tmp/troupe/deploy/node",
      "bash /tmp/troupe/deploy/scripts/install-agents.sh",
      "install -m 755 /tmp/troupe/deploy/scripts/verify.sh /opt/troupe/bin/troupe-verify",
    ]
  }

  # A driver that does not fit the kernel shows only after a reboot.
  provisioner "shell" {
    expect_disconnect = true
    inline            = ["sudo systemctl reboot"]
  }

  provisioner "shell" {
    pause_before = "60s"
    inline       = ["sudo /opt/troupe/bin/troupe-verify ${source.name} learner actor replay evaluator"]
  }

  # Nothing of this machine's identity goes into the image; the next one gets its own. And nobody logs in over the
  # network: shells come through Session Manager. Not before the last step: Packer itself comes back by SSH after the
  # reboot, and needs the daemon to the end.
  provisioner "shell" {
    inline = [
      "sudo systemctl disable ssh.service ssh.socket 2>/dev/null || true",
      "rm -f ~/.ssh/authorized_keys",
      "sudo rm -rf /tmp/troupe /tmp/troupe.tar.gz /root/.ssh /etc/ssh/ssh_host_*",
      "sudo cloud-init clean --logs --seed",
      "sudo truncate -s 0 /etc/machine-id",
    ]
  }

  # The newest build of each kind is what Terraform takes.
  post-processor "manifest" {
    output      = "${path.root}/manifest.json"
    strip_path  = true
    custom_data = { kind = source.name }
  }
}
