# ------------------------------------------------------------------ the run

variable "run" {
  description = "Name of the run: part of every name in AWS, and its folder in the bucket."
  type        = string
  default     = "pong"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,22}[a-z0-9]$", var.run))
    error_message = "run should be 2 to 24 lower-case letters, digits and dashes, beginning with a letter."
  }
}

variable "preset" {
  description = "Preset of the run, see `troupe presets`."
  type        = string
  default     = "pong-apex-paper"

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]*$", var.preset))
    error_message = "preset should be a name from `troupe presets`."
  }
}

variable "run_file" {
  description = "TOML file of the run, such as my.toml, instead of preset; it may start from a preset (`preset = \"pong-apex\"`)."
  type        = string
  default     = ""

  validation {
    condition     = var.run_file == "" || try(length(file(var.run_file)) <= 4096, false)
    error_message = "run_file should be a file of at most 4096 letters: machines read it from the parameter store."
  }
}

variable "overrides" {
  description = "Configuration fields that differ from the preset, such as { \"env.id\" = \"atari:seaquest\" }."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for field in keys(var.overrides) : can(regex("^[a-z]+\\.[a-z0-9_.]+$", field))])
    error_message = "overrides should have keys of the form section.field."
  }
}

variable "modules" {
  description = "Modules with environments or algorithms that the machines may import, such as [\"my_package.my_env\"]; the images must have them."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for name in var.modules : can(regex("^[A-Za-z_]\\w*(\\.[A-Za-z_]\\w*)*$", name))])
    error_message = "modules should have names such as my_package.my_env."
  }
}

variable "running" {
  description = "Whether machines run. false keeps network, bucket and volumes, and ends the cost of machines."
  type        = bool
  default     = true
}

variable "stop_at" {
  description = "Time at which AWS ends all machines, such as 2027-01-31T18:00:00Z; empty: never. Your computer need not be on."
  type        = string
  default     = ""

  validation {
    condition     = var.stop_at == "" || can(regex("^\\d{4}-\\d{2}-\\d{2}T\\d{2}:\\d{2}:\\d{2}Z$", var.stop_at))
    error_message = "stop_at should be a time in UTC such as 2027-01-31T18:00:00Z."
  }
}

variable "keys_dir" {
  description = "Folder with the run's keys, made by `troupe keys new DIR`. Secret keys never enter plan or state."
  type        = string

  validation {
    condition = alltrue([
      for file in ["learner.secret", "replay.secret", "actor.secret", "evaluator.secret", "learner.public", "replay.public", "allowed"] :
      try(fileexists("${var.keys_dir}/${file}"), false)
    ])
    error_message = "keys_dir should be a folder made by `troupe keys new DIR`; a key or the allow-list is missing in it."
  }
}

# ------------------------------------------------------------------ images

variable "packer_manifest" {
  description = "Manifest that `packer build` wrote; empty: give image IDs."
  type        = string
  default     = ""

  validation {
    condition     = var.packer_manifest == "" || try(fileexists(var.packer_manifest), false)
    error_message = "packer_manifest does not exist; run `packer build` first, or give cpu_image_id and gpu_image_id."
  }
}

variable "cpu_image_id" {
  description = "Image of actors, replay and evaluator (and of a learner without a GPU); empty: the newest in the manifest."
  type        = string
  default     = ""

  validation {
    condition     = var.cpu_image_id == "" || can(regex("^ami-[0-9a-f]{8,17}$", var.cpu_image_id))
    error_message = "cpu_image_id should look like ami-0123456789abcdef0."
  }
}

variable "gpu_image_id" {
  description = "Image of a learner with a GPU; empty: the newest in the manifest."
  type        = string
  default     = ""

  validation {
    condition     = var.gpu_image_id == "" || can(regex("^ami-[0-9a-f]{8,17}$", var.gpu_image_id))
    error_message = "gpu_image_id should look like ami-0123456789abcdef0."
  }
}

variable "cpu_root_device" {
  description = "Root device of the CPU image (Debian)."
  type        = string
  default     = "/dev/xvda"
}

variable "gpu_root_device" {
  description = "Root device of the GPU image (Ubuntu)."
  type        = string
  default     = "/dev/sda1"
}

# ------------------------------------------------------------------ machines

variable "learner_instance_type" {
  description = "Instance type of a learner."
  type        = string
  default     = "g6.2xlarge"
}

variable "learner_device" {
  description = "Where updates run: cuda or cpu."
  type        = string
  default     = "cuda"

  validation {
    condition     = contains(["cuda", "cpu"], var.learner_device)
    error_message = "learner_device should be cuda or cpu."
  }
}

variable "learner_disk_gb" {
  description = "Root volume of the learner in GB: image, checkpoints, videos."
  type        = number
  default     = 100

  validation {
    condition     = var.learner_disk_gb >= 10 && var.learner_disk_gb <= 16384
    error_message = "learner_disk_gb should be from 10 to 16384."
  }

  validation {
    condition     = var.learner_device == "cpu" || var.learner_disk_gb >= 100
    error_message = "learner_disk_gb should be at least 100 with a GPU: no disk is smaller than its image."
  }
}

variable "learners" {
  description = "Learners that share each batch, one machine each. With several zones, AWS charges for gradients between zones."
  type        = number
  default     = 1

  validation {
    condition     = var.learners >= 1 && var.learners <= 64 && floor(var.learners) == var.learners
    error_message = "learners should be a whole number from 1 to 64."
  }

  validation {
    condition     = var.learners == 1 || can(regex("^(10|192\\.168|172\\.(1[6-9]|2\\d|3[01])|100\\.(6[4-9]|[7-9]\\d|1[01]\\d|12[0-7]))\\.", var.vpc_cidr))
    error_message = "several learners should have a vpc_cidr of private addresses, such as 10.20.0.0/16: gradients are not encrypted."
  }
}

variable "learner_peer_spot" {
  description = "Use spot machines for all learners except the first, which has the run."
  type        = bool
  default     = true
}

variable "replay_shards" {
  description = "Replay shards, one machine each."
  type        = number
  default     = 1

  validation {
    condition     = var.replay_shards >= 1 && var.replay_shards <= 64 && floor(var.replay_shards) == var.replay_shards
    error_message = "replay_shards should be a whole number from 1 to 64."
  }
}

variable "replay_instance_type" {
  description = "Instance type of a shard. Memory decides: Atari takes 1 to 6 GB per million items."
  type        = string
  default     = "r6i.xlarge"
}

variable "replay_disk_gb" {
  description = "Root volume of a shard in GB; it holds the stored items unless replay_volume_gb is given."
  type        = number
  default     = 40

  validation {
    condition     = var.replay_disk_gb >= 10 && var.replay_disk_gb <= 16384
    error_message = "replay_disk_gb should be from 10 to 16384."
  }
}

variable "replay_volume_gb" {
  description = "Volume in GB that keeps a shard's items when its machine is replaced; 0: none."
  type        = number
  default     = 0

  validation {
    condition     = var.replay_volume_gb >= 0 && var.replay_volume_gb <= 16384
    error_message = "replay_volume_gb should be from 0 to 16384."
  }
}

variable "actors" {
  description = "Actor processes in the whole run; `make scale ACTORS=N` changes it."
  type        = number
  default     = 12

  validation {
    condition     = var.actors >= 0 && var.actors <= 4000 && floor(var.actors) == var.actors
    error_message = "actors should be a whole number from 0 to 4000."
  }
}

variable "actors_per_machine" {
  description = "Actor processes per machine: one per core of actor_instance_types."
  type        = number
  default     = 4

  validation {
    condition     = var.actors_per_machine >= 1 && var.actors_per_machine <= 128 && floor(var.actors_per_machine) == var.actors_per_machine
    error_message = "actors_per_machine should be a whole number from 1 to 128."
  }
}

variable "slots_per_actor" {
  description = "Environment copies per actor process."
  type        = number
  default     = 30

  validation {
    condition     = var.slots_per_actor >= 1 && var.slots_per_actor <= 1024 && floor(var.slots_per_actor) == var.slots_per_actor
    error_message = "slots_per_actor should be a whole number from 1 to 1024."
  }
}

variable "max_actor_machines" {
  description = "Upper limit for scaling the group of actor machines by hand."
  type        = number
  default     = 0

  validation {
    condition     = var.max_actor_machines >= 0 && var.max_actor_machines <= 2000
    error_message = "max_actor_machines should be from 0 to 2000."
  }
}

variable "actor_instance_types" {
  description = "Types of actor machines; several make spot capacity more likely. All should have about the same number of cores."
  type        = list(string)
  default     = ["c7i.xlarge", "c6i.xlarge", "c6a.xlarge", "c5.xlarge", "m6i.xlarge", "m5.xlarge"]

  validation {
    condition     = length(var.actor_instance_types) >= 1 && length(var.actor_instance_types) == length(distinct(var.actor_instance_types))
    error_message = "actor_instance_types should name at least one type, and none twice."
  }
}

variable "actor_disk_gb" {
  description = "Root volume of actors and evaluator in GB."
  type        = number
  default     = 16

  validation {
    condition     = var.actor_disk_gb >= 10 && var.actor_disk_gb <= 1024
    error_message = "actor_disk_gb should be from 10, the size of the image, to 1024."
  }
}

variable "actor_spot" {
  description = "Use spot machines for actors."
  type        = bool
  default     = true
}

variable "evaluator" {
  description = "Run an evaluator."
  type        = bool
  default     = true
}

variable "evaluator_instance_types" {
  description = "Instance types of the evaluator."
  type        = list(string)
  default     = ["c7i.large", "c6i.large", "c6a.large", "m6i.large"]

  validation {
    condition     = length(var.evaluator_instance_types) >= 1
    error_message = "evaluator_instance_types should name at least one type."
  }
}

variable "evaluator_spot" {
  description = "Use a spot machine for the evaluator."
  type        = bool
  default     = true
}

# ------------------------------------------------------------------ network

variable "vpc_cidr" {
  description = "Addresses of the VPC."
  type        = string
  default     = "10.20.0.0/16"

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && try(tonumber(split("/", var.vpc_cidr)[1]) >= 16 && tonumber(split("/", var.vpc_cidr)[1]) <= 22, false)
    error_message = "vpc_cidr should be an IPv4 block with a prefix of 16 to 22 bits, such as 10.20.0.0/16."
  }
}

variable "availability_zones" {
  description = "Zones to use; empty: the first of the region. More zones offer more spot machines, but traffic between zones costs money."
  type        = list(string)
  default     = []

  validation {
    condition     = length(var.availability_zones) <= 8 && length(var.availability_zones) == length(distinct(var.availability_zones))
    error_message = "availability_zones should name at most 8 zones, and none twice."
  }
}

variable "nat_gateway" {
  description = "Keep machines in private subnets behind a NAT gateway; false saves its price and gives them public addresses that accept no connections."
  type        = bool
  default     = true
}

variable "tensorboard_cidrs" {
  description = "Blocks that may open TensorBoard, which has no login; empty: only through Session Manager."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for block in var.tensorboard_cidrs : can(cidrnetmask(block)) && try(tonumber(split("/", block)[1]) >= 8, false)])
    error_message = "tensorboard_cidrs should be IPv4 blocks of at least 8 bits, such as 203.0.113.7/32: the whole world is not admitted."
  }
}

# ------------------------------------------------------------------ keeping and watching

variable "stop_when_complete" {
  description = "Let the learner scale every group to zero once the run is complete and copied to the bucket. The next `apply` starts them again."
  type        = bool
  default     = true
}

variable "destroy_artifacts" {
  description = "Let `destroy` delete the bucket with all checkpoints in it."
  type        = bool
  default     = false
}

variable "keep_old_versions_days" {
  description = "Days after which replaced and deleted objects of the bucket are removed for good."
  type        = number
  default     = 7

  validation {
    condition     = var.keep_old_versions_days >= 1
    error_message = "keep_old_versions_days should be at least 1."
  }
}

variable "log_retention_days" {
  description = "Days that logs are kept."
  type        = number
  default     = 30

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731], var.log_retention_days)
    error_message = "log_retention_days should be one of 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731."
  }
}

variable "flow_logs" {
  description = "Log connections that the security groups refuse."
  type        = bool
  default     = true
}

variable "alarm_email" {
  description = "Address that receives alarms (AWS asks for confirmation first); empty: none."
  type        = string
  default     = ""

  validation {
    condition     = var.alarm_email == "" || can(regex("^[^@\\s]+@[^@\\s]+$", var.alarm_email))
    error_message = "alarm_email should be an address such as ada@example.org."
  }
}

variable "budget_usd_per_month" {
  description = "Budget of the account in dollars per month, with alarms at 80 % spent and 100 % forecast; 0: none."
  type        = number
  default     = 500

  validation {
    condition     = var.budget_usd_per_month >= 0
    error_message = "budget_usd_per_month should not be negative."
  }
}

variable "hourly_prices_usd" {
  description = "On-demand prices in dollars per hour for the cost estimate, overriding the examples in prices.json."
  type        = map(number)
  default     = {}
}

variable "spot_price_share" {
  description = "Spot price as a share of the on-demand price, for the cost estimate."
  type        = number
  default     = 0.4

  validation {
    condition     = var.spot_price_share > 0 && var.spot_price_share <= 1
    error_message = "spot_price_share should be above 0 and at most 1."
  }
}

variable "tags" {
  description = "Tags of all resources, in addition to Project and Run."
  type        = map(string)
  default     = {}
}
