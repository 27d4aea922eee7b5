# What `packer init` installs. In a file of its own: Packer before 1.7 has the builder built in and does not know
# this block.
packer {
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.3"
    }
  }
}
